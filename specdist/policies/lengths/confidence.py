"""Stop after a token that the draft itself thought unlikely: the ``assistant_confidence_threshold`` of
transformers, the simple form of DISCO (Mamou et al. 2024). transformers also moves the threshold where
scikit-learn is installed; here it stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, WithoutHistory
from specdist.policies.options import (
    MAX_DRAFT_TOKENS,
    SHARE,
    Grid,
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


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold(WithoutHistory, RegisteredPolicy):
    """Goes on while the drawn token's probability is at least ``stop_probability``."""

    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    stop_probability: float = policy_option(
        0.4, SHARE, help="stop after a token that the draft gave less than this probability"
    )
    name = "confidence"
    drafts = "until the draft gives the drawn token less than this probability (transformers)"
    papers = (MAMOU_2024,)
    grid: ClassVar[Grid] = {"stop_probability": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    uses_features = True

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        wants_R = np.full(len(rows.slots_R), rows.num_drafted < self.max_draft_tokens)
        if rows.features is not None:
            wants_R &= rows.features.probabilities_R >= self.stop_probability
        return wants_R
