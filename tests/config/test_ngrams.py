"""Options of drafting from n-grams."""

from __future__ import annotations

from typing import Any

import pytest

from specdist.utils.errors import UserError
from tests.config.options import config


def test_n_grams_draft_without_a_model() -> None:
    """No rank and no costs for it; blocks are as long as a batch has room for where tokens depend on them."""
    ngrams = config(draft="ngram")
    greedy = config(draft="ngram", temperature=0)
    assert (greedy.policy, greedy.policy_options) == ("goodput", {"max_draft_tokens": 64})
    assert greedy.needs_costs and greedy.shares_room
    assert config(draft="ngram", ngram_rows=True).policy == "goodput"
    assert (ngrams.policy, ngrams.policy_options) == (
        "confidence", {"max_draft_tokens": 63, "stop_probability": 0.1}
    )  # fmt: skip
    assert config(draft="ngram", temperature=0).block_tokens == 65
    assert config(draft="ngram", max_num_seqs=1000).block_tokens == 9
    assert config(draft="ngram", policy="fixed").policy_options == {"num_draft_tokens": 5}
    assert ngrams.uses_draft and not ngrams.uses_draft_model
    assert not (ngrams.needs_costs or ngrams.chooses_rounds or ngrams.is_asynchronous or ngrams.warnings())
    config(draft="ngram", tp_size=2).check_world(2)
    with pytest.raises(UserError, match="3 ranks were launched, but --tp_size 2 needs 2"):
        config(draft="ngram", tp_size=2).check_world(3)
    assert not config(draft="ngram", policy="none").uses_ngrams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_rows": True}, "--ngram_rows has no effect without --draft ngram"),
        ({"ngram_texts": ["run"]}, "--ngram_texts run has no effect without --draft ngram"),
        ({"ngram_column": "text"}, "--ngram_column text has no effect without --ngram_texts"),
        (
            {"draft": "ngram", "ngram_rows": True, "ngram_size": 10},
            "--ngram_size 10 must be at least 1024",
        ),
    ],
)
def test_other_texts_are_for_n_grams(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**({"draft": "small"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "adaedl"}, "--policy adaedl decides by what a draft model says"),
        ({"policy": "svip"}, "--policy svip decides by what a draft model says"),
        ({"overlap": "asynchronous"}, "--overlap asynchronous is for a draft model"),
        ({"draft_placement": "own"}, "--draft_placement own is for a draft model"),
        ({"draft_quantization": "int8"}, "--draft_quantization int8 is for a draft model"),
        ({"draft_window": 64}, "--draft_window 64 is for a draft model"),
        ({"head": "h"}, "--head h is for a draft model"),
    ],
)
def test_what_needs_a_draft_model_does_not_go_with_n_grams(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(draft="ngram", **options)
