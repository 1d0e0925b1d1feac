"""Texts of the draft: its own draws after each prompt, the same ones for a training that goes on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdist.job.ranks.topology import Topology
from specdist.training.drafts.data import Example
from specdist.training.drafts.own_texts import Writer, with_own_texts
from tests.job.pair import Pair

NUM_TOKENS, VOCAB_SIZE = 12, 250
TOPOLOGY = Topology(rank=0, world_size=1, tp_size=1, uses_draft=False, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def writer(pair: Pair) -> Writer:
    model = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)
    return Writer(
        model=model, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS, temperature=1.0, seed=3,
        tokens_per_pass=20, topology=TOPOLOGY,
    )  # fmt: skip


def prompts() -> list[Example]:
    """Of several lengths, so that they share passes with others of unlike length."""
    generator = np.random.default_rng(0)
    found = []
    for row_id, length in enumerate([9, 2, 17, 5, 30, 2, 11, 24]):
        ids = generator.integers(3, VOCAB_SIZE, length).astype(np.int32)
        found.append(Example(row_id=row_id, sample_index=0, prompt_ids=ids[:1], completion_ids=ids[1:]))
    return found


def own_texts(writer: Writer, step: int = 0) -> list[list[int]]:
    texts = with_own_texts(writer, prompts(), step)
    for text, prompt in zip(texts, prompts(), strict=True):
        assert len(text.prompt_ids) == 1
        assert np.array_equal(text.token_ids[: prompt.num_tokens], prompt.token_ids)
    return [
        text.token_ids[prompt.num_tokens :].tolist() for text, prompt in zip(texts, prompts(), strict=True)
    ]


def alone(writer: Writer, prompt: Example) -> list[int]:
    """What the draft would say greedily, without any other prompt beside it."""
    ids = prompt.token_ids.tolist()
    text: list[int] = []
    ends = writer.model.generation_config.eos_token_id
    while len(text) < NUM_TOKENS:
        with torch.no_grad():
            token_id = int(writer.model(torch.tensor([ids + text])).logits[0, -1].argmax())
        if token_id >= VOCAB_SIZE:
            break
        text.append(token_id)
        if token_id == ends:
            break
    return text


def test_every_prompt_goes_on_as_it_would_alone(writer: Writer) -> None:
    greedy = dataclasses.replace(writer, temperature=0)
    expected = [alone(writer, prompt) for prompt in prompts()]
    assert own_texts(greedy) == expected


def test_a_text_ends_with_the_draft_s_end_and_before_an_unknown_token(writer: Writer) -> None:
    whole = own_texts(dataclasses.replace(writer, temperature=0, vocab_size=10**6))
    [end, unknown] = whole[0][2], max(whole[1])
    before = writer.model.generation_config.eos_token_id
    writer.model.generation_config.eos_token_id = end
    try:
        cut = own_texts(dataclasses.replace(writer, temperature=0, vocab_size=unknown))
    finally:
        writer.model.generation_config.eos_token_id = before
    for text, longer in zip(cut, whole, strict=True):
        ends = [place for place, token_id in enumerate(longer) if token_id == end]
        unknowns = [place for place, token_id in enumerate(longer) if token_id >= unknown]
        assert text == longer[: min([NUM_TOKENS, *unknowns, *(place + 1 for place in ends)])]
    assert cut[1] != whole[1]


def test_the_same_step_of_a_training_has_the_same_texts(writer: Writer) -> None:
    """And another step, seed or temperature others."""
    first = own_texts(writer)
    assert own_texts(writer) == first
    assert own_texts(writer, step=1) != first
    for change in ({"seed": 4}, {"num_tokens": 5}, {"temperature": 0.5}):
        assert own_texts(dataclasses.replace(writer, **change)) != first
