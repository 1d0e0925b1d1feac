"""Policies that stop after a drawn token, by what the draft knows of it (confidence, SVIP, Draft & Verify,
AdaEDL) or a trained head says of it (SpecDec++, SPRINTER). The token is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

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

MAMOU_2024 = (
    "Mamou, Pereg, Korat, Berchansky, Timor, Wasserblat, Schwartz (2024). *Dynamic Speculation Lookahead "
    "Accelerates Speculative Decoding of Large Language Models*. "
    "[arXiv:2405.04304](https://arxiv.org/abs/2405.04304)"
)
ZHANG_2024 = (
    "Zhang, Xu, Liang, Chen, He, Wang, Tu (2024). *Draft Model Knows When to Stop: A Self-Verification "
    "Length Policy for Speculative Decoding*. [arXiv:2411.18462](https://arxiv.org/abs/2411.18462)"
)
ZHANG_2023 = (
    "Zhang, Wang, Li, Shou, Chen, Chen, Mehrotra (2023). *Draft & Verify: Lossless Large Language Model "
    "Acceleration via Self-Speculative Decoding*. ACL 2024; "
    "[arXiv:2309.08168](https://arxiv.org/abs/2309.08168)"
)
AGRAWAL_2024 = (
    "Agrawal, Jeon, Lee (2024). *AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language "
    "Models via an Entropy-based Lower Bound on Token Acceptance Probability*. "
    "[arXiv:2410.18351](https://arxiv.org/abs/2410.18351)"
)
HUANG_2024 = (
    "Huang, Guo, Wang (2024). *SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths*. "
    "[arXiv:2405.19715](https://arxiv.org/abs/2405.19715)"
)
ZHONG_2025 = (
    "Zhong, Teku, Tandon (2025). *Speeding up Speculative Decoding via Sequential Approximate Verification "
    "(SPRINTER)*. [arXiv:2502.04557](https://arxiv.org/abs/2502.04557)"
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


@dataclass(kw_only=True)
class SpecDecPlusPlus(RegisteredPolicy):
    """SpecDec++ (Huang, Guo, Wang 2024): stop once some token of the block is likely to be rejected.

    A threshold on that probability is a sufficient condition for stopping (Theorem 4.3). The acceptance head
    estimates for every token the probability that it is accepted after those before it (Equation 4.1), and
    the block Y_1..Y_k+1 ends where

        1 - prod_i<=k sigmoid(f(e_i)) > h

    with e_i the draft's last hidden state of Y_i as *input*. The pass that gives e_k also gives the
    distribution of Y_k+1, which is drawn before the decision and is verified too (section 4.2 and Algorithm
    1).
    """

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_threshold: float = policy_option(
        0.7, SHARE, symbol="h", help="stop where a rejection in the block is likelier than this"
    )
    name = "specdecpp"
    drafts = "until a rejection before the last token is likelier than h, by the acceptance head's estimates"
    papers = (HUANG_2024,)
    reads_head = True
    head_kind = "acceptance"
    # The probability that all of a draft slot's block is accepted.
    _survival: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        draft_slots_R, estimates_DR = rows.draft_slots_R, rows.earlier_estimates_DR
        if rows.num_drafted == 0:
            self._begin(draft_slots_R)
        if estimates_DR is None:
            return np.full(len(draft_slots_R), self.max_draft_tokens)
        # Nothing is asked about the token before a block.
        survival_DR = np.where(np.isnan(estimates_DR), 1.0, estimates_DR)
        survival_DR[0] *= self._survival[draft_slots_R]
        survival_DR = survival_DR.cumprod(axis=0)
        self._survival[draft_slots_R] = survival_DR[-1]
        return rows.up_to_first(1 - survival_DR <= self.stop_threshold, self.max_draft_tokens)

    def _begin(self, draft_slots_R: np.ndarray) -> None:
        size = int(draft_slots_R.max(initial=-1)) + 1
        if size > len(self._survival):
            self._survival = np.append(self._survival, np.ones(size - len(self._survival)))
        self._survival[draft_slots_R] = 1.0


@dataclass(frozen=True, kw_only=True)
class Sprinter(RegisteredPolicy):
    """SPRINTER (Zhong, Teku, Tandon 2025): draft until a small verifier doubts a token.

    After every drafted token x the verifier V estimates how likely Q(x) / P(x) is at most λ, a constant of
    its training. While V >= τ (``verifier_threshold``) the block goes on; a token with V < τ is kept and ends
    the block (Algorithm 1).

    What the target does with the block is an option of the run, not of the policy. As in the paper, lossily,
    only the last token (doubted, or at the cap) is verified. The paper then takes nothing more from the
    target's pass; here an accepted last token is followed by a bonus token, as in every round. It follows the
    target's own distribution, so the output can only come nearer to it. With ``--verify all`` every token is
    verified, exactly, and V only ends blocks.

    V reads the state that x was drawn from, so that its estimate comes with the draw (a block of N passed
    tokens and a doubted one takes N + 1 draft passes, Theorem 3), or the state with x as input, one pass
    later.
    """

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    verifier_threshold: float = policy_option(
        0.5, SHARE, symbol="τ", help="stop after a token of which the verifier is less sure than this"
    )
    name = "sprinter"
    drafts = "until the verifier is less sure than τ of a token; **not exact** unless `--verify all`"
    papers = (ZHONG_2025,)
    reads_head = True
    head_kind = "verifier"
    needs_last_estimate = True

    def wants(self, rows: DraftSequences) -> np.ndarray:
        if rows.features is None or rows.features.estimates is None:
            return np.full(len(rows.slots_R), self.max_draft_tokens)
        is_sure_DR = rows.features.estimates >= self.verifier_threshold
        return rows.up_to_first(is_sure_DR, self.max_draft_tokens)
