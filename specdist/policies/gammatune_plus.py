"""GammaTune+ (Gautam, Shrestha, Reddy 2025, section 4.2): GammaTune that also stops inside a block, where the
draft's likeliest token is unlikely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows
from specdist.policies.gammatune import GammaTune


@dataclass(frozen=True, kw_only=True)
class GammaTunePlus(GammaTune):
    """``stop_probability`` (τ): of the likeliest token, below which a block ends after the drawn one."""

    stop_probability: float
    uses_features: ClassVar[bool] = True

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        wants_R = super().wants_more(rows)
        if rows.features is not None:
            wants_R &= rows.features.top_probabilities_R >= self.stop_probability
        return wants_R
