"""AdaEDL (Agrawal et al. 2024): an entropy bound against a threshold that follows the row's own acceptance.

Drafting stops after a token for which 1 - sqrt(γ H) < λ. After every block the threshold moves as in
Draft & Verify (Zhang et al. 2023): up while too little is accepted, which drafts less, and down again.

    A  <- β1 A + (1 - β1) accepted / drafted
    λ' =  λ + ε if A <= α else λ - ε
    λ  <- β2 λ + (1 - β2) λ'

With the published β2 = 0.9 and ε = 0.01 the threshold moves by a thousandth per block, so that within a row
of ordinary length its first value matters more than its movement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, VerifiedBlocks

# Columns of the history.
ACCEPTANCE, THRESHOLD = 0, 1


@dataclass(frozen=True, kw_only=True)
class AdaEdl:
    """A row's history is (A, λ); it begins with A = 0, as in the code of Draft & Verify.

    Attributes:
        stop_bound: the first λ.
        stop_bound_step, stop_bound_momentum: ε, β2.
        entropy_factor: γ.
        target_acceptance, acceptance_momentum: α, β1.
    """

    max_draft_tokens: int
    stop_bound: float
    stop_bound_step: float
    stop_bound_momentum: float
    entropy_factor: float
    target_acceptance: float
    acceptance_momentum: float
    uses_features: ClassVar[bool] = True

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, self.stop_bound

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            bounds_R = 1 - np.sqrt(self.entropy_factor * rows.features.entropies_R)
            wants_R &= bounds_R >= rows.histories_RH[:, THRESHOLD]
        return wants_R

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        shares_R = blocks.num_accepted_R / blocks.num_drafted_R
        acceptances_R, thresholds_R = blocks.histories_RH.T
        acceptances_R = _moved(acceptances_R, shares_R, self.acceptance_momentum)
        signs_R = np.where(acceptances_R <= self.target_acceptance, 1, -1)
        moved_R = thresholds_R + self.stop_bound_step * signs_R
        thresholds_R = _moved(thresholds_R, moved_R, self.stop_bound_momentum)
        return np.stack([acceptances_R, thresholds_R], axis=1)


def _moved(values_R: np.ndarray, towards_R: np.ndarray, momentum: float) -> np.ndarray:
    return momentum * values_R + (1 - momentum) * towards_R
