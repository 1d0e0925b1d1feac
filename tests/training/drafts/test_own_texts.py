"""Texts of the draft: its own draws after each prompt, the same ones for a training that goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist.training.drafts import trainer
from specdist.training.drafts.data import IGNORED, Examples, collate, example
from tests.job.pair import Pair

NUM_TOKENS, VOCAB_SIZE = 12, 250


@pytest.fixture(scope="module")
def draft(pair: Pair) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temperature at which the likeliest token is drawn."""
    monkeypatch.setattr(trainer, "LEAST_TEMPERATURE", 1e-5)


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, VOCAB_SIZE, length).tolist() for length in (9, 2, 17, 5, 30, 11)]


def written(draft: PreTrainedModel, **changes: Any) -> list[list[int]]:
    """Texts after each prompt, in a batch that has a completion, too."""
    batch = collate([example([*range(9)], 4), *(example(ids, 0) for ids in prompts())])
    kinds: dict[str, Any] = {
        "temperature": 0.0, "vocab_size": VOCAB_SIZE, "num_tokens": NUM_TOKENS, "seeds": [0, 1]
    }  # fmt: skip
    found = trainer.with_own_texts(batch, draft, **kinds | changes)["labels"]
    labels = [labels_L[labels_L != IGNORED].tolist() for labels_L in found]
    assert labels[0] == [4, 5, 6, 7, 8]
    for ids, label in zip(prompts(), labels[1:], strict=True):
        assert label[: len(ids)] == ids
    return [label[len(ids) :] for ids, label in zip(prompts(), labels[1:], strict=True)]


def alone(draft: PreTrainedModel, ids: list[int]) -> list[int]:
    """What the draft would say greedily, without any other prompt beside it."""
    text: list[int] = []
    while len(text) < NUM_TOKENS:
        with torch.no_grad():
            token_id = int(draft(torch.tensor([ids + text])).logits[0, -1].argmax())
        if token_id >= VOCAB_SIZE:
            break
        text.append(token_id)
        if token_id == draft.generation_config.eos_token_id:
            break
    return text


@pytest.mark.usefixtures("greedy")
def test_every_prompt_goes_on_as_it_would_alone(draft: PreTrainedModel) -> None:
    assert written(draft) == [alone(draft.eval(), ids) for ids in prompts()]


@pytest.mark.usefixtures("greedy")
def test_a_text_ends_with_the_draft_s_end_and_before_an_unknown_token(
    draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(draft, vocab_size=10**6)
    end, unknown = whole[0][2], max(whole[1])
    monkeypatch.setattr(draft.generation_config, "eos_token_id", end)
    cut = written(draft, vocab_size=unknown)
    for text, longer in zip(cut, whole, strict=True):
        ends = [place + 1 for place, token_id in enumerate(longer) if token_id == end]
        unknowns = [place for place, token_id in enumerate(longer) if token_id >= unknown]
        assert text == longer[: min([NUM_TOKENS, *unknowns, *ends])]
    assert cut[1] != whole[1]


def test_completions_stay_a_quarter_of_the_sequences() -> None:
    completion, prompt = example([1, 2], 1), example([1, 2], 0)
    learned = Examples([completion], [], [prompt] * 11).learned
    assert sum(int(each["labels"][0] == IGNORED) for each in learned) == 4 and len(learned) == 15
