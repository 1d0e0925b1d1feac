"""Stop after a token that the draft itself thought unlikely: the ``assistant_confidence_threshold`` of
transformers, the simple form of DISCO (Mamou et al. 2024). transformers also moves the threshold where
scikit-learn is installed; here it stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, WithoutHistory


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold(WithoutHistory):
    """Goes on while the drawn token's probability is at least ``stop_probability``."""

    max_draft_tokens: int
    stop_probability: float
    uses_features: ClassVar[bool] = True

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            wants_R &= rows.features.probabilities_R >= self.stop_probability
        return wants_R
