"""A constant draft length (Leviathan et al. 2023): the baseline of every adaptive policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, WithoutHistory


@dataclass(frozen=True)
class FixedLength(WithoutHistory):
    """Always ``num_draft_tokens``; 0 never drafts."""

    num_draft_tokens: int
    uses_features: ClassVar[bool] = False

    @property
    def max_draft_tokens(self) -> int:
        return self.num_draft_tokens

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        return np.full(len(rows.slots_R), rows.num_drafted < self.num_draft_tokens)
