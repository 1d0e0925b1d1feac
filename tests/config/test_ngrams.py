"""Options of drafting from n-grams."""

from __future__ import annotations

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
