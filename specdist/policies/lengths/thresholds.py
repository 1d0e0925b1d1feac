"""Policies that stop after a drawn token, by what the draft knows of it: confidence, SVIP, Draft & Verify,
AdaEDL. The token is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.policies.base import DraftFeatures, DraftSequences, VerifiedBlocks
from specdist.policies.options import (
    AMOUNT,
    MAX_DRAFT_TOKENS,
    SHARE,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

MAMOU_2024 = Reference(
    authors="Mamou, Pereg, Korat, Berchansky, Timor, Wasserblat, Schwartz",
    year=2024,
    title="Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models",
    arxiv="2405.04304",
)
ZHANG_2024 = Reference(
    authors="Zhang, Xu, Liang, Chen, He, Wang, Tu",
    year=2024,
    title="Draft Model Knows When to Stop: A Self-Verification Length Policy for Speculative Decoding",
    arxiv="2411.18462",
)
ZHANG_2023 = Reference(
    authors="Zhang, Wang, Li, Shou, Chen, Chen, Mehrotra",
    year=2023,
    title="Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
    venue="ACL 2024",
    arxiv="2309.08168",
)
AGRAWAL_2024 = Reference(
    authors="Agrawal, Jeon, Lee",
    year=2024,
    title="AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language Models "
    "via an Entropy-based Lower Bound on Token Acceptance Probability",
    arxiv="2410.18351",
)
# Columns of the history of a threshold that moves.
ACCEPTANCE, THRESHOLD = 0, 1
# Step of the threshold (ε), and factors of its and of the acceptance rate's moving averages (β2, β1).
STEP, MOMENTUM, ACCEPTANCE_MOMENTUM = 0.01, 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class ThresholdPolicy(RegisteredPolicy):
    """Goes on after a token as long as :meth:`goes_on` says so, and up to a cap."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    uses_features = True

    def goes_on(self, features: DraftFeatures, histories_RH: np.ndarray) -> np.ndarray:
        """bool [D, R]: draft another after tokens with these features?"""
        raise NotImplementedError

    def wants(self, rows: DraftSequences) -> np.ndarray:
        if rows.features is None:
            return np.full(len(rows.slots_R), self.max_draft_tokens)
        return rows.up_to_first(self.goes_on(rows.features, rows.histories_RH), self.max_draft_tokens)


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold(ThresholdPolicy):
    """The ``assistant_confidence_threshold`` of transformers, the simple form of DISCO (Mamou et al. 2024):
    goes on while the drawn token's probability is at least ``stop_probability``. transformers also moves the
    threshold where scikit-learn is installed; here it stays."""

    stop_probability: float = policy_option(
        0.4, SHARE, help="stop after a token that the draft gave less than this probability"
    )
    name = "confidence"
    drafts = "until the draft gives the drawn token less than this probability (transformers)"
    papers = (MAMOU_2024,)

    def goes_on(self, features: DraftFeatures, histories_RH: np.ndarray) -> np.ndarray:
        return features.probabilities >= self.stop_probability


@dataclass(frozen=True, kw_only=True)
class Svip(ThresholdPolicy):
    """SVIP (Zhang et al. 2024): stops where the draft's entropy bounds the chance of acceptance too low.

    Pinsker's inequality, and a cross entropy that is about c times the draft's own entropy H, give an
    acceptance of at least 1 - sqrt(c H) (equation 6). The constant is part of the threshold: algorithm 1
    draws a token and then stops if sqrt(H), in nats, of the distribution that it came from exceeds h.
    """

    stop_root_entropy: float = policy_option(
        0.3, AMOUNT, symbol="h", help="stop after a token whose sqrt(entropy in nats) exceeds this"
    )
    name = "svip"
    drafts = "until the square root of the draft's entropy (nats) exceeds h"
    papers = (ZHANG_2024,)

    def goes_on(self, features: DraftFeatures, histories_RH: np.ndarray) -> np.ndarray:
        return np.sqrt(features.entropies) <= self.stop_root_entropy


@dataclass(frozen=True, kw_only=True)
class DraftVerify(ThresholdPolicy):
    """Draft & Verify (Zhang et al. 2023, section 3.3): stops after a token that the draft gave less than γ,
    which moves by the rule of :func:`moved_histories`.

    A sequence's history is (acceptance rate, γ); it begins with a rate of 0. The paper drafts with a part of
    the target's layers; the rule works with any draft.
    """

    stop_probability: float = policy_option(
        0.6, SHARE, symbol="first γ", help="first threshold: stop after a token that the draft gave less"
    )
    target_acceptance: float = policy_option(0.9, SHARE, symbol="α", help="acceptance rate to keep")
    name = "draft_verify"
    drafts = "until the draft gives the drawn token less than γ, which follows the sequence's acceptance"
    papers = (ZHANG_2023,)

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, self.stop_probability

    def goes_on(self, features: DraftFeatures, histories_RH: np.ndarray) -> np.ndarray:
        return features.probabilities >= histories_RH[:, THRESHOLD]

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return moved_histories(blocks, self.target_acceptance)


@dataclass(frozen=True, kw_only=True)
class AdaEdl(ThresholdPolicy):
    """AdaEDL (Agrawal et al. 2024): stops after a token for which 1 - sqrt(γ H) < λ, a threshold that moves
    by the rule of :func:`moved_histories`.

    A sequence's history is (A, λ), with A = 0 at first, as in the code of Draft & Verify. With the published
    β2 = 0.9 and ε = 0.01 the threshold moves by a thousandth per block, so within a completion of ordinary
    length its first value matters more than its changes.
    """

    stop_bound: float = policy_option(
        0.4, SHARE, symbol="first λ", help="first threshold of 1 - sqrt(entropy_factor * entropy)"
    )
    entropy_factor: float = policy_option(0.2, AMOUNT, symbol="γ", help="factor of the entropy in the bound")
    target_acceptance: float = policy_option(0.9, SHARE, symbol="α", help="acceptance rate to keep")
    name = "adaedl"
    drafts = "until 1 - sqrt(γ entropy) falls below λ, which follows the sequence's acceptance"
    papers = (AGRAWAL_2024,)

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, self.stop_bound

    def goes_on(self, features: DraftFeatures, histories_RH: np.ndarray) -> np.ndarray:
        return 1 - np.sqrt(self.entropy_factor * features.entropies) >= histories_RH[:, THRESHOLD]

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return moved_histories(blocks, self.target_acceptance)


def moved_histories(blocks: VerifiedBlocks, target_acceptance: float) -> np.ndarray:
    """[R, 2]: (A, λ) after these blocks, by the rule of Draft & Verify, which AdaEDL took over with its
    numbers: up while too little is accepted, which drafts less, and down again.

        A  <- β1 A + (1 - β1) accepted / drafted
        λ' =  λ + ε if A <= α else λ - ε
        λ  <- β2 λ + (1 - β2) λ'
    """
    shares_R = blocks.num_accepted_R / blocks.num_drafted_R
    acceptances_R, thresholds_R = blocks.histories_RH.T
    acceptances_R = ACCEPTANCE_MOMENTUM * acceptances_R + (1 - ACCEPTANCE_MOMENTUM) * shares_R
    moved_R = thresholds_R + STEP * np.where(acceptances_R <= target_acceptance, 1, -1)
    return np.stack([acceptances_R, MOMENTUM * thresholds_R + (1 - MOMENTUM) * moved_R], axis=1)
