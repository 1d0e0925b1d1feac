"""Ropes with other frequencies beyond a border: each row's tokens are those of ``generate`` for it alone.

Without the rows' own frequencies, a row beyond the border changes the tokens of all that share its passes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdist.models.attention.rope import recomputed_from, rope_border
from specdist.models.passes.acceleration import Acceleration
from tests.engine.harness import Harness, requests_for
from tests.models.families import VOCAB_SIZE, noisy_copy, tiny_model

BORDER, MAX_NEW_TOKENS = 32, 14
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2, 3, 4, 6, 8, 10],
    "original_max_position_embeddings": BORDER,
    "factor": 8.0,
}
# Phi-3 computes a row anew once it crosses the border, Llama keeps what is in the cache.
FAMILIES = ("phi3", "llama")
# Below the border to the end, crossing it at once, in the middle and with the last token, and beyond it; two
# of them have the same first pages, on both sides of the border.
LENGTHS = (5, 18, 19, 23, 26, 29, 31, 32, 33, 47)


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    more: dict[str, Any] = {"original_max_position_embeddings": BORDER} if family == "phi3" else {}
    return tiny_model(family, seed=3, initializer_range=0.25, rope_parameters=ROPE, **more)


def prompts() -> list[list[int]]:
    text = torch.randint(2, VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(5)).tolist()
    return [text[:length] for length in LENGTHS]


@functools.cache
def expected(family: str) -> list[list[int]]:
    """By transformers, row by row."""
    found = []
    for prompt in prompts():
        output = model_of(family).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"draft": False},
    "synchronous": {"num_draft_tokens": 4},
    "all accepted": {"num_draft_tokens": 5, "noise": 0.0},
    "asynchronous": {"num_draft_tokens": 3, "num_ahead_tokens": 4, "num_branches": 2},
    "small chunks": {"num_draft_tokens": 3, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages": {"num_draft_tokens": 3, "num_pages": 34, "max_num_seqs": 4},
    "static": {"num_draft_tokens": 4, "acceleration": Acceleration(is_static=True)},
    "ngram": {"draft": False, "ngrams": True},
}


CASES = [
    *((name, "phi3") for name in OPTIONS),
    *((name, "llama") for name in ("synchronous", "asynchronous", "static")),
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_every_row_has_the_tokens_of_generate(name: str, family: str) -> None:
    options = dict(OPTIONS[name])
    target = model_of(family)
    draft = noisy_copy(target, options.pop("noise", 0.02)) if options.pop("draft", True) else None
    harness = Harness(target, draft, max_new_tokens=MAX_NEW_TOKENS, **options)
    found = harness.generate(requests_for(prompts()))
    assert [list(completion.token_ids) for completion in found] == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_border_decides_the_tokens(family: str) -> None:
    """Else the other tests could not fail: one kind of frequencies for a whole text gives other tokens."""
    model = model_of(family)
    assert rope_border(model.config) == BORDER
    assert recomputed_from(model.config) == (BORDER if family == "phi3" else None)
    for prompt, completion in zip(prompts(), expected(family), strict=True):
        token_ids = [*prompt, *completion[:-1]]
        with torch.no_grad():
            logits_TV = model(torch.tensor([token_ids])).logits[0, len(prompt) - 1 :]
        crosses = len(prompt) <= BORDER < len(token_ids)
        assert (logits_TV.argmax(-1).tolist() != completion) == crosses, len(prompt)
