"""SVIP (Zhang et al. 2024): stop where the draft's entropy bounds the chance of acceptance too low.

Pinsker's inequality, and a cross entropy that is about c times the draft's own entropy H, give an acceptance
of at least 1 - sqrt(c H) (equation 6). The constant is part of the threshold: algorithm 1 draws a token and
then stops if sqrt(H) of the distribution that it came from exceeds h. The token is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, WithoutHistory
from specdist.policies.options import (
    AMOUNT,
    MAX_DRAFT_TOKENS,
    Grid,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

ZHANG_2024 = Reference(
    authors="Zhang, Xu, Liang, Chen, He, Wang, Tu",
    year=2024,
    title="Draft Model Knows When to Stop: A Self-Verification Length Policy for Speculative Decoding",
    arxiv="2411.18462",
)


@dataclass(frozen=True, kw_only=True)
class Svip(WithoutHistory, RegisteredPolicy):
    """Stops after a token with sqrt(entropy in nats) above ``stop_root_entropy``."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_root_entropy: float = policy_option(
        0.3, AMOUNT, symbol="h", help="stop after a token whose sqrt(entropy in nats) exceeds this"
    )
    name = "svip"
    drafts = "until the square root of the draft's entropy (nats) exceeds h"
    papers = (ZHANG_2024,)
    grid: ClassVar[Grid] = {"stop_root_entropy": (0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.8)}
    uses_features = True

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            wants_R &= np.sqrt(rows.features.entropies_R) <= self.stop_root_entropy
        return wants_R
