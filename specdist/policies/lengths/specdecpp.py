"""SpecDec++ (Huang, Guo, Wang 2024): stop once some token of the block is likely to be rejected.

A threshold on that probability is a sufficient condition for stopping (Theorem 4.3). The acceptance head
estimates for every token the probability that it is accepted after those before it (Equation 4.1), and the
block Y_1..Y_k+1 ends where

    1 - prod_i<=k sigmoid(f(e_i)) > h

with e_i the draft's last hidden state of Y_i as *input*. The pass that gives e_k also gives the distribution
of Y_k+1, which is drawn before the decision and is verified too (section 4.2 and Algorithm 1).
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
    """Stops after a token when 1 - the product of the estimates before it is above ``stop_threshold``."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_threshold: float = policy_option(
        0.7, SHARE, symbol="h", help="stop where a rejection in the block is likelier than this"
    )
    name = "specdecpp"
    drafts = "until a rejection before the last token is likelier than h, by the acceptance head's estimates"
    papers = (HUANG_2024,)
    grid: ClassVar[Grid] = {"stop_threshold": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    uses_features = False
    head_kind: ClassVar[HeadKind] = "acceptance"
    needs_last_estimate: ClassVar[bool] = False
    # By draft slot: probability that all of its block is accepted.
    _survival: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        draft_slots_R = rows.draft_slots_R
        if rows.num_drafted == 0:
            self._begin(draft_slots_R)
        elif rows.earlier_estimates_R is not None:
            self._survival[draft_slots_R] *= rows.earlier_estimates_R
        is_below_R = 1 - self._survival[draft_slots_R] <= self.stop_threshold
        return is_below_R & (rows.num_drafted < self.max_draft_tokens)

    def _begin(self, draft_slots_R: np.ndarray) -> None:
        size = int(draft_slots_R.max(initial=-1)) + 1
        if size > len(self._survival):
            self._survival = np.append(self._survival, np.ones(size - len(self._survival)))
        self._survival[draft_slots_R] = 1.0
