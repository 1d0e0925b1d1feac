"""The whole chain with pairs as SPRINTER's: GPT-Neo and GPT-2, small beside large, with GPT-2's tokenizer.

What sets them apart: positions are learned, and end; the output head is the embedding; 50257 tokens, whose
logits may be padded; the end token is all there is of special tokens, and a prompt does not begin with one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Tokenizer, PreTrainedModel

from tests.job.launching import Ended, read_output, run_here
from tests.job.pair import save, some_texts, train_tokenizer, write_arrow

NUM_TOKENS = 50257
PADDED = 50304
END = NUM_TOKENS - 1
# The draft's positions end later, the target's are the limit of a row.
MAX_POSITIONS, MAX_DRAFT_POSITIONS = 40, 64
NUM_PROMPTS = 6
SAMPLED = {"temperature": 1, "top_k": 50, "seed": 7}
# What the layers that the draft lacks add to the sum, in parts of what they would.
LATER_LAYERS = 0.1
COMMON = {"vocab_size": NUM_TOKENS, "initializer_range": 0.4}
# Five heads for the 25 of GPT-2 XL; local layers that see less than most prompts.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_neo": (
        {
            "hidden_size": 32, "num_layers": 4, "num_heads": 4, "window_size": 6,
            "attention_types": [[["global", "local"], 2]], "max_position_embeddings": MAX_POSITIONS,
        },
        {
            "vocab_size": PADDED, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": MAX_DRAFT_POSITIONS,
        },
    ),
    "gpt2": (
        {"n_embd": 40, "n_layer": 4, "n_head": 5, "n_positions": MAX_POSITIONS, "vocab_size": PADDED},
        {"vocab_size": NUM_TOKENS, "n_layer": 2, "n_positions": MAX_DRAFT_POSITIONS},
    ),
}  # fmt: skip


class GptPair(NamedTuple):
    """Folders of the models, a file of prompts whose last is too long, and the target in transformers."""

    target: Path
    draft: Path
    prompts: Path
    model: PreTrainedModel

    @property
    def options(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "prompts": self.prompts,
            "device": "cpu",
            "temperature": 0,
            "max_new_tokens": MAX_POSITIONS,
        }


@cache
def gpt2_tokenizer() -> GPT2Tokenizer:
    """The ids of GPT-2's, most of them for nothing: the alphabet, merges, and the end token last."""
    trained = json.loads(train_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)[1:]
    tokens += [f"unused{index}" for index in range(len(tokens), END)]
    vocab = {token: token_id for token_id, token in enumerate([*tokens, "<|endoftext|>"])}
    return GPT2Tokenizer(vocab=vocab, merges=[tuple(merge) for merge in trained["merges"]])


@torch.no_grad()
def build_models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random target, and a draft of its first layers, which agrees with it now and then.

    Padding has no logit to speak of in the target, as after training, and the largest in the draft.
    """
    target_settings, draft_settings = PAIRS[family]
    torch.manual_seed(0)
    models = []
    for settings in (target_settings, target_settings | draft_settings):
        config = AutoConfig.for_model(family, **(COMMON | settings))
        assert config.tie_word_embeddings and config.pad_token_id is None and config.eos_token_id == END
        models.append(AutoModelForCausalLM.from_config(config).float().eval())
    target, draft = models
    embedding = target.transformer.wte.weight
    # A smaller share of the sum that the head sees: else a tied model repeats its last token for ever.
    embedding *= 0.1
    embedding[NUM_TOKENS:] = 0
    for block in target.transformer.h[len(draft.transformer.h) :]:
        for name, parameter in block.named_parameters():
            if name.endswith(("out_proj.weight", "c_proj.weight")):
                parameter *= LATER_LAYERS
    weights = target.state_dict()
    for name, parameter in draft.named_parameters():
        length = min(len(parameter), len(weights[name]))
        parameter[:length] = weights[name][:length]
    draft.transformer.wte.weight[NUM_TOKENS:] = 10
    draft.transformer.wte.weight[NUM_TOKENS + 1 :] = -10
    return target, draft


def save_as_published(folder: Path, model: PreTrainedModel) -> Path:
    """With the names in the hub's files: GPT-2's lack a prefix, and both hold masks that nobody reads."""
    save(folder, model, gpt2_tokenizer())
    path = folder / "model.safetensors"
    weights = load_file(path)
    mask = torch.ones(1, 1, MAX_POSITIONS, MAX_POSITIONS).tril()
    for layer in range(len(model.transformer.h)):
        attention = "attn.attention" if model.config.model_type == "gpt_neo" else "attn"
        weights[f"transformer.h.{layer}.{attention}.bias"] = mask.clone()
        weights[f"transformer.h.{layer}.{attention}.masked_bias"] = torch.tensor(-1e9)
    prefix = "transformer." if model.config.model_type == "gpt2" else ""
    save_file({name.removeprefix(prefix): weight for name, weight in weights.items()}, path)
    return folder


@pytest.fixture(scope="module", params=PAIRS)
def gpt_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GptPair:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = gpt2_tokenizer()
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (NUM_TOKENS, END, None)
    target, draft = build_models(request.param)
    texts = [*some_texts(NUM_PROMPTS - 1), "the quick brown fox " * MAX_POSITIONS]
    write_arrow(folder / "prompts.arrow", {"prompt": texts})
    return GptPair(
        save_as_published(folder / "target", target),
        save_as_published(folder / "draft", draft),
        folder / "prompts.arrow",
        target,
    )


@pytest.fixture(scope="module")
def greedy_run(gpt_pair: GptPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    output = tmp_path_factory.mktemp("run") / "greedy"
    return output, run_here(**gpt_pair.options, output=output)


def test_greedy_rows_are_those_of_transformers_up_to_the_last_position(
    gpt_pair: GptPair, greedy_run: tuple[Path, Ended]
) -> None:
    output, ended = greedy_run
    assert 0.1 < ended.totals["draft_acceptance_rate"] < 0.9
    *rows, too_long = read_output(output).to_pylist()
    assert too_long["finish_reason"] == "error" and f"--max_seq_len {MAX_POSITIONS}" in too_long["error"]
    tokenizer = gpt2_tokenizer()
    for row in rows:
        prompt_ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected = gpt_pair.model.generate(
                prompt_ids, do_sample=False, max_length=MAX_POSITIONS, pad_token_id=END
            )[0, prompt_ids.shape[1] :].tolist()
        assert row["completion_ids"] == expected
        assert row["finish_reason"] == ("stop" if expected[-1] == END else "length")
        assert len(set(expected)) > len(expected) / 2
    assert any(row["finish_reason"] == "length" for row in rows)


def test_a_draft_that_is_the_target_is_accepted_always(gpt_pair: GptPair, tmp_path: Path) -> None:
    options = gpt_pair.options | SAMPLED | {"draft": gpt_pair.target}
    assert run_here(**options, output=tmp_path / "run").totals["draft_acceptance_rate"] == 1
