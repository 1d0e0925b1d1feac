"""Rows of latent attention: blocks of every length, taken back, shared, branched and preempted."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from specdist.models.attention import expansion
from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import PAGE_SIZE, Harness, requests_for
from tests.engine.test_greedy import MAX_NEW_TOKENS, prompts_of_lengths, reference
from tests.engine.test_identity import check_preempted
from tests.models.all_families import build, near_copy
from tests.models.families import noisy_copy, tiny_model

Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny_model("youtu")
    return target, noisy_copy(target)


@pytest.fixture(autouse=True)
def expands_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts expand latents, and blocks do not."""
    monkeypatch.setattr(expansion, "OPERATIONS_PER_BYTE", 0)


def test_tokens_are_those_of_generate_whatever_the_blocks_prefixes_and_preemptions(pair: Pair) -> None:
    target, draft = pair
    system, *rests = prompts_of_lengths(16, 1, 9, 14)
    prompts = [*(system + rest for rest in rests), rests[1]]
    expected = [reference(target, prompt, None) for prompt in prompts]
    requests = requests_for(prompts)
    kept_back = shared = 0
    for num_draft_tokens in (0, 1, 7):
        options = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": MAX_NEW_TOKENS}
        replica = Harness(
            target, draft if num_draft_tokens else None, max_num_seqs=3, max_num_batched_tokens=33, **options
        )
        completions = replica.generate(requests)
        assert [completion.token_ids for completion in completions] == expected, num_draft_tokens
        stats = replica.stats_recorder.close_shard(0)
        kept_back += stats.num_draft_tokens - stats.num_accepted_tokens
        shared += stats.num_shared_prompt_tokens
        if num_draft_tokens == 7:
            check_preempted(target, draft, requests, completions, 96 // PAGE_SIZE + 2, **options)
    assert kept_back > 0 and shared > 0


def test_a_draft_works_ahead_with_branches(pair: Pair) -> None:
    target, draft = pair
    prompts = prompts_of_lengths(3, 17, 31)
    replica = Harness(
        target, draft, num_ahead_tokens=5, num_branches=3, max_new_tokens=MAX_NEW_TOKENS,
        acceleration=Acceleration(is_static=True),
    )  # fmt: skip
    found = [completion.token_ids for completion in replica.generate(requests_for(prompts))]
    assert found == [reference(target, prompt, None) for prompt in prompts]


def test_prompts_beside_recurrent_layers() -> None:
    """Of Kimi Linear, in chunks: some of them expand."""
    target = build("kimi_linear")
    prompts = prompts_of_lengths(3, 31, 44)
    replica = Harness(
        target,
        near_copy(target),
        num_draft_tokens=4,
        max_num_batched_tokens=33,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    found = [completion.token_ids for completion in replica.generate(requests_for(prompts))]
    assert found == [reference(target, prompt, None) for prompt in prompts]
