"""SpecDec++ (Huang, Guo, Wang 2024): stop once some token of the block is likely to be rejected.

The best moment to stop is a threshold on that probability (Theorem 3.2); the acceptance head estimates of
every token the chance that it is accepted after those before it (section 4.1), and the block ends where

    1 - prod_i sigmoid(f(e_i)) > h

with e_i the draft's last hidden state of token i as *input*. It is known one pass after the token was drawn,
before the next token is drawn, so that no drawn token is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, WithoutHistory
from specdist.policies.options import (
    MAX_DRAFT_TOKENS,
    SHARE,
    Grid,
    HeadKind,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

HUANG_2024 = Reference(
    authors="Huang, Guo, Wang",
    year=2024,
    title="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
    arxiv="2405.19715",
)


@dataclass(kw_only=True)
class SpecDecPlusPlus(WithoutHistory, RegisteredPolicy):
    """Stops before a token when 1 - the product of the block's estimates is above ``stop_threshold``."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_threshold: float = policy_option(
        0.7, SHARE, symbol="h", help="stop where a rejection in the block is likelier than this"
    )
    name = "specdecpp"
    drafts = (
        "until some token of the block is likelier than h to be rejected, by the acceptance head's estimates"
    )
    papers = (HUANG_2024,)
    grid: ClassVar[Grid] = {"stop_threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    uses_features = False
    head_kind: ClassVar[HeadKind] = "acceptance"
    # By chain: that all of its block is accepted.
    _survival: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        draft_slots_R = rows.draft_slots_R
        if rows.num_drafted == 0:
            self._begin(draft_slots_R)
        elif rows.features is not None and rows.features.estimates_R is not None:
            self._survival[draft_slots_R] *= rows.features.estimates_R
        is_below_R = 1 - self._survival[draft_slots_R] <= self.stop_threshold
        return is_below_R & (rows.num_drafted < self.max_draft_tokens)

    def _begin(self, draft_slots_R: np.ndarray) -> None:
        size = int(draft_slots_R.max(initial=-1)) + 1
        if size > len(self._survival):
            self._survival = np.append(self._survival, np.ones(size - len(self._survival)))
        self._survival[draft_slots_R] = 1.0
