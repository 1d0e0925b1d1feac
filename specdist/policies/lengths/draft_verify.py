"""Draft & Verify (Zhang et al. 2023, section 3.3): a confidence threshold that follows the acceptance rate.

Drafting stops after a token that the draft gave less than γ; the token is kept. After every block γ moves by
the rule that AdaEDL took over (:mod:`specdist.policies.lengths.adaedl`): up while too little is accepted,
which drafts less. The paper drafts with a part of the target's layers; the rule works with any draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, VerifiedBlocks
from specdist.policies.lengths.adaedl import THRESHOLD, moved_histories
from specdist.policies.options import (
    MAX_DRAFT_TOKENS,
    SHARE,
    Grid,
    RegisteredPolicy,
    policy_option,
    shared_option,
)
from specdist.policies.references import Reference

ZHANG_2023 = Reference(
    authors="Zhang, Wang, Li, Shou, Chen, Chen, Mehrotra",
    year=2023,
    title="Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
    venue="ACL 2024",
    arxiv="2309.08168",
)
# The paper's, which it does not vary.
STEP, MOMENTUM, ACCEPTANCE_MOMENTUM = 0.01, 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class DraftVerify(RegisteredPolicy):
    """A sequence's history is (acceptance rate, γ); it begins with a rate of 0."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_probability: float = policy_option(
        0.6, SHARE, symbol="first γ", help="first threshold: stop after a token that the draft gave less"
    )
    target_acceptance: float = policy_option(0.9, SHARE, symbol="α", help="acceptance rate to keep")
    name = "draft_verify"
    drafts = "until the draft gives the drawn token less than γ, which follows the sequence's acceptance"
    papers = (ZHANG_2023,)
    grid: ClassVar[Grid] = {"stop_probability": (0.2, 0.4, 0.6, 0.8), "target_acceptance": (0.7, 0.9)}
    uses_features = True

    @property
    def initial_history(self) -> tuple[float, ...]:
        return 0.0, self.stop_probability

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            wants_R &= rows.features.probabilities_R >= rows.histories_RH[:, THRESHOLD]
        return wants_R

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        return moved_histories(
            blocks,
            step=STEP,
            momentum=MOMENTUM,
            target_acceptance=self.target_acceptance,
            acceptance_momentum=ACCEPTANCE_MOMENTUM,
        )
