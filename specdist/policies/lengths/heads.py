"""Policies that read a trained head: SpecDec++ and SPRINTER."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdist.policies.base import DraftSequences
from specdist.policies.options import (
    MAX_DRAFT_TOKENS,
    SHARE,
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
ZHONG_2025 = Reference(
    authors="Zhong, Teku, Tandon",
    year=2025,
    title="Speeding up Speculative Decoding via Sequential Approximate Verification (SPRINTER)",
    arxiv="2502.04557",
)


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
