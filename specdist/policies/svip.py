"""SVIP (Zhang et al. 2024): stop where the draft's entropy bounds the chance of acceptance too low.

Pinsker's inequality, and a cross entropy that is about c times the draft's own entropy H, give an acceptance
of at least 1 - sqrt(c H) (equation 6). The constant is part of the threshold: algorithm 1 draws a token and
then stops if sqrt(H) of the distribution that it came from exceeds h. The token is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, WithoutHistory


@dataclass(frozen=True, kw_only=True)
class Svip(WithoutHistory):
    """Stops after a token with sqrt(entropy in nats) above ``stop_root_entropy``."""

    max_draft_tokens: int
    stop_root_entropy: float
    uses_features: ClassVar[bool] = True

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            wants_R &= np.sqrt(rows.features.entropies_R) <= self.stop_root_entropy
        return wants_R
