"""GammaTune+ (Gautam, Shrestha, Reddy 2025, section 4.2): GammaTune that also stops inside a block, where the
draft's likeliest token is unlikely.

A block that τ has stopped at A tokens, all of them accepted, earns the bonus like any other that was
accepted whole: w moves towards A + δ, which may be less than γ. By the letter of A = γ it would earn nothing,
and w would move towards A; the paper does not say which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences
from specdist.policies.lengths.gammatune import GammaTune
from specdist.policies.options import SHARE, Grid, policy_option


@dataclass(frozen=True, kw_only=True)
class GammaTunePlus(GammaTune):
    """``stop_probability`` (τ): of the likeliest token, below which a block ends after the drawn one."""

    stop_probability: float = policy_option(
        0.4, SHARE, symbol="τ", help="stop after a token whose distribution gives its likeliest token less"
    )
    name = "gammatune_plus"
    drafts = "the same, and ends a block where the likeliest token falls below τ"
    grid: ClassVar[Grid] = {
        "length_bonus": (1.0, 2.0, 4.0),
        "length_rate": (0.25, 0.5, 0.75),
        "stop_probability": (0.2, 0.4, 0.6, 0.8),
    }
    uses_features = True

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = super().wants_more(rows)
        if rows.features is not None:
            wants_R &= rows.features.top_probabilities_R >= self.stop_probability
        return wants_R
