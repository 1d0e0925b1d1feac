"""AdaEDL (Agrawal et al. 2024): an entropy bound against a threshold that follows the sequence's own
acceptance.

Drafting stops after a token for which 1 - sqrt(γ H) < λ. After every block the threshold moves as in
Draft & Verify (Zhang et al. 2023): up while too little is accepted, which drafts less, and down again.

    A  <- β1 A + (1 - β1) accepted / drafted
    λ' =  λ + ε if A <= α else λ - ε
    λ  <- β2 λ + (1 - β2) λ'

With the published β2 = 0.9 and ε = 0.01 the threshold moves by a thousandth per block, so within a completion
of ordinary length its first value matters more than its changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, VerifiedBlocks
from specdist.policies.options import (
    AMOUNT,
    MAX_DRAFT_TOKENS,
    SHARE,
    Grid,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

# Columns of the history.
ACCEPTANCE, THRESHOLD = 0, 1


AGRAWAL_2024 = Reference(
    authors="Agrawal, Jeon, Lee",
    year=2024,
    title="AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language Models "
    "via an Entropy-based Lower Bound on Token Acceptance Probability",
    arxiv="2410.18351",
)


@dataclass(frozen=True, kw_only=True)
class AdaEdl(RegisteredPolicy):
    """A sequence's history is (A, λ), with A = 0 at first, as in the code of Draft & Verify."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_bound: float = policy_option(
        0.4, SHARE, symbol="first λ", help="first threshold of 1 - sqrt(entropy_factor * entropy)"
    )
    stop_bound_step: float = policy_option(
        0.01, SHARE, symbol="ε", help="step of the threshold after a block"
    )
    stop_bound_momentum: float = policy_option(0.9, SHARE, symbol="β2", help="EMA factor of the threshold")
    entropy_factor: float = policy_option(0.2, AMOUNT, symbol="γ", help="factor of the entropy in the bound")
    target_acceptance: float = policy_option(0.9, SHARE, symbol="α", help="acceptance rate to keep")
    acceptance_momentum: float = policy_option(
        0.5, SHARE, symbol="β1", help="EMA factor of the acceptance rate"
    )
    name = "adaedl"
    drafts = "until 1 - sqrt(γ entropy) falls below λ, which follows the sequence's acceptance"
    papers = (AGRAWAL_2024,)
    grid: ClassVar[Grid] = {"stop_bound": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    uses_features = True

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, self.stop_bound

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            bounds_R = 1 - np.sqrt(self.entropy_factor * rows.features.entropies_R)
            wants_R &= bounds_R >= rows.histories_RH[:, THRESHOLD]
        return wants_R

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return moved_histories(
            blocks,
            step=self.stop_bound_step,
            momentum=self.stop_bound_momentum,
            target_acceptance=self.target_acceptance,
            acceptance_momentum=self.acceptance_momentum,
        )


def moved_histories(
    blocks: VerifiedBlocks,
    *,
    step: float,
    momentum: float,
    target_acceptance: float,
    acceptance_momentum: float,
) -> np.ndarray:
    """[R, 2]: (A, λ) after these blocks, by the rule of Draft & Verify."""
    shares_R = blocks.num_accepted_R / blocks.num_drafted_R
    acceptances_R, thresholds_R = blocks.histories_RH.T
    acceptances_R = _moved(acceptances_R, shares_R, acceptance_momentum)
    signs_R = np.where(acceptances_R <= target_acceptance, 1, -1)
    thresholds_R = _moved(thresholds_R, thresholds_R + step * signs_R, momentum)
    return np.stack([acceptances_R, thresholds_R], axis=1)


def _moved(values_R: np.ndarray, towards_R: np.ndarray, momentum: float) -> np.ndarray:
    return momentum * values_R + (1 - momentum) * towards_R
