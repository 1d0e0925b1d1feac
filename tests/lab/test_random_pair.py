"""The random pair, tiny: what the dial does, and that what is written is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdist.job.models.model_plan import check_same_tokens, common_vocab_size
from specdist.lab.plan.shapes import SHAPES, Shape
from specdist.models.files.checkpoint import Checkpoint, open_checkpoint
from tests.lab.random_pair import (
    DialledTarget,
    find_epsilon,
    num_draft_layers,
    random_prompts,
    write_pair,
)

TINY = Shape(
    num_layers=6, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, vocab_size=1024
)
EPSILON = 0.1
STRANGE_TEXT = "héllo  wörld\n\t日本 \N{SNOWMAN}"


@pytest.fixture(scope="module")
def dialled(tmp_path_factory: pytest.TempPathFactory) -> DialledTarget:
    folder = tmp_path_factory.mktemp("dialled")
    write_pair(folder, TINY, epsilon=1.0, seed=0, dtype=torch.float32)
    return DialledTarget(folder / "target", num_draft_layers(TINY), dtype=torch.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair at ``EPSILON``."""
    folder = tmp_path_factory.mktemp("written")
    write_pair(folder, TINY, epsilon=EPSILON, seed=0, dtype=torch.float32)
    return folder


def open_pair(folder: Path) -> tuple[Checkpoint, Checkpoint]:
    return open_checkpoint("--target", str(folder / "target")), open_checkpoint(
        "--draft", str(folder / "draft")
    )


@torch.inference_mode()
def agreement(folder: Path) -> float:
    """Share of the written target's greedy tokens that the written draft takes for likeliest."""
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / role) for role in ("target", "draft"))
    prompts = random_prompts(TINY.vocab_size, seed=1)
    text = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=0,
    )
    chosen = draft(text).logits[:, prompts.shape[1] - 1 : -1].argmax(-1)
    return (chosen == text[:, prompts.shape[1] :]).float().mean().item()


def test_acceptance_falls_as_the_dial_is_turned_up(dialled: DialledTarget) -> None:
    found = [dialled.acceptance(epsilon, seed=1) for epsilon in (0.0, 0.1, 1.0)]
    assert found[0] == 1.0
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.2


def test_the_written_pair_agrees_as_the_dial_said(written: Path, dialled: DialledTarget) -> None:
    # The weights are scaled before the product in one and after it in the other: near-ties may fall apart.
    assert agreement(written) == pytest.approx(dialled.acceptance(EPSILON, seed=1), abs=0.01)


def test_greedy_text_is_no_loop_and_peaked_like_a_trained_model(written: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(written / "target")
    prompts = random_prompts(TINY.vocab_size, seed=4)[:8]
    text = model.generate(prompts, max_new_tokens=96, do_sample=False, pad_token_id=0)[:, prompts.shape[1] :]
    assert min(len(set(row)) for row in text.tolist()) > 48
    assert len({tuple(row[-8:]) for row in text.tolist()}) == len(text)
    with torch.inference_mode():
        probabilities = model(prompts).logits.softmax(-1)
    assert 0.4 < probabilities.max(-1).values.mean() < 0.9


def test_written_pair_opens_in_specdist_and_has_one_tokenizer(written: Path) -> None:
    target, draft = open_pair(written)
    assert len(target.weight_files) == TINY.num_layers + 2
    assert len(draft.weight_files) == num_draft_layers(TINY) + 2
    check_same_tokens(target, draft)
    assert common_vocab_size(target, draft) == TINY.vocab_size
    assert not target.stop_token_ids()
    tokenizer = AutoTokenizer.from_pretrained(written / "target")
    assert tokenizer.decode(tokenizer(STRANGE_TEXT)["input_ids"]) == STRANGE_TEXT
    assert all(tokenizer.convert_ids_to_tokens(list(range(TINY.vocab_size))))


def test_large_shapes_have_the_sizes_of_their_names() -> None:
    for name, shape in SHAPES.items():
        config = shape.llama_config(torch.bfloat16)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        wanted = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(wanted, rel=0.12)


def test_the_search_finds_the_dial_or_refuses() -> None:
    assert find_epsilon(lambda epsilon: 1 / (1 + epsilon), 0.8) == pytest.approx(0.25, rel=0.06)
    assert find_epsilon(lambda epsilon: 1 / (1 + epsilon), 0.4) == pytest.approx(1.5, rel=0.06)
    with pytest.raises(ValueError, match=r"an acceptance of 0.1 is less than the 0.20"):
        find_epsilon(lambda epsilon: 1 / (1 + epsilon), 0.1)
