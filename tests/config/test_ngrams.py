"""Options of drafting from n-grams."""

from __future__ import annotations

from typing import Any

import pytest

from specdist.utils.errors import UserError
from tests.config.options import config


def test_n_grams_draft_without_a_model() -> None:
    """No rank for it; by default as many candidates as pay, by measured times of the target's passes."""
    ngrams = config(draft="ngram")
    assert (ngrams.policy, ngrams.policy_options) == ("goodput", {"max_draft_tokens": 20})
    assert ngrams.needs_costs and ngrams.shares_room
    fixed = config(draft="ngram", policy="fixed")
    assert fixed.policy_options == {"num_draft_tokens": 5} and not fixed.needs_costs
    assert ngrams.uses_draft and not ngrams.uses_draft_model
    assert not (ngrams.chooses_rounds or ngrams.is_asynchronous or ngrams.warnings())
    config(draft="ngram", tp_size=2).check_world(2)
    with pytest.raises(UserError, match="3 ranks were launched, but --tp_size 2 needs 2"):
        config(draft="ngram", tp_size=2).check_world(3)
    assert not config(draft="ngram", policy="none").uses_ngrams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "adaedl"}, "--policy adaedl decides by what a draft model says"),
        (
            {"policy": "confidence"},
            "--policy confidence decides by what a draft model says.*goodput or",
        ),
        ({"overlap": "asynchronous"}, "--overlap asynchronous is for a draft model"),
        ({"draft_placement": "own"}, "--draft_placement own is for a draft model"),
        ({"draft_quantization": "int8"}, "--draft_quantization int8 is for a draft model"),
        ({"head": "h"}, "--head h is for a draft model"),
    ],
)
def test_what_needs_a_draft_model_does_not_go_with_n_grams(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(draft="ngram", **options)
