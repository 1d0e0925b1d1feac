"""A constant draft length (Leviathan et al. 2023): the baseline of every adaptive policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, WithoutHistory
from specdist.policies.options import COUNT, Grid, RegisteredPolicy, policy_option
from specdist.policies.references import LEVIATHAN_2023


@dataclass(frozen=True)
class FixedLength(WithoutHistory, RegisteredPolicy):
    """Always ``num_draft_tokens``; 0 never drafts."""

    num_draft_tokens: int = policy_option(5, COUNT, symbol="K", help="draft tokens of every block")
    name = "fixed"
    drafts = "always K tokens"
    papers = (LEVIATHAN_2023,)
    grid: ClassVar[Grid] = {"num_draft_tokens": (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20)}
    uses_features = False

    @property
    def max_draft_tokens(self) -> int:
        return self.num_draft_tokens

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        return np.full(len(rows.slots_R), rows.num_drafted < self.num_draft_tokens)
