"""gpt-oss, with sinks, windows and experts, far past its windows and the border of its rotary embeddings."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.harness import Harness, requests_for
from tests.engine.test_greedy import prompts_of_lengths
from tests.models.all_families import build
from tests.models.families import noisy_copy, spread_sinks

NUM_NEW = 100
# A mean of losses of logits of order 10, in float32: sums in another order.
LEAST_LOSS = 1e-4


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built = build("gpt_oss")
    rope = {**built.config.rope_parameters, "original_max_position_embeddings": 64, "factor": 16.0}
    assert rope["rope_type"] == "yarn" and rope["truncate"] is False
    built.config.max_position_embeddings, built.config.rope_parameters = 1024, rope
    longer = AutoModelForCausalLM.from_config(built.config, attn_implementation="eager").float().eval()
    longer.load_state_dict(built.state_dict())
    spread_sinks(longer)
    return longer


@torch.inference_mode()
def mean_losses(model: PreTrainedModel, prompt: list[int], new: list[int], dtype: torch.dtype) -> list[float]:
    """By how much the logits of the new tokens are below the largest, in transformers and float32; and those
    of the tokens that transformers would choose in their places in this precision."""
    exact, rounded = (
        copy.deepcopy(model).to(each)(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
        for each in (torch.float32, dtype)
    )
    chosen = torch.stack([torch.tensor(new), rounded.argmax(dim=-1)])
    return (exact.max(dim=-1).values - exact.gather(1, chosen.T).T).mean(dim=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_ahead_tokens"), [(torch.float32, 0), (torch.bfloat16, 5)], ids=["synchronous", "ahead"]
)
def test_every_token_is_the_likeliest_of_transformers_up_to_rounding(
    model: PreTrainedModel, dtype: torch.dtype, num_ahead_tokens: int
) -> None:
    """In bfloat16 a token may go to other experts, there as here: what that costs is compared."""
    target = copy.deepcopy(model).to(dtype)
    harness = Harness(
        target,
        noisy_copy(target, scale=1e-3),
        num_draft_tokens=4,
        num_ahead_tokens=num_ahead_tokens,
        max_new_tokens=NUM_NEW,
        max_num_seqs=2,
        max_seq_len=1024,
    )
    prompts = prompts_of_lengths(3, 60)
    completions = harness.generate(requests_for(prompts))
    assert harness.stats_recorder.close_shard(0).num_accepted_tokens > NUM_NEW / 4
    rounded = copy.deepcopy(target).float()
    others = copy.deepcopy(rounded)
    with torch.no_grad():
        for layer in others.model.layers:
            layer.self_attn.sinks.copy_(layer.self_attn.sinks.flip(0))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == NUM_NEW
        found, theirs = mean_losses(rounded, prompt, completion.token_ids, dtype)
        most = max(LEAST_LOSS, 2 * theirs)
        assert found <= most
        assert mean_losses(others, prompt, completion.token_ids, dtype)[0] > 2 * most, "has no power"
