"""A constant draft length (Leviathan et al. 2023): the baseline of every adaptive policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FixedLength:
    """Always ``num_draft_tokens``; 0 never drafts."""

    num_draft_tokens: int

    @property
    def max_draft_tokens(self) -> int:
        return self.num_draft_tokens

    def wants_more(self, slots_R: np.ndarray, num_drafted: int) -> np.ndarray:
        return np.full(len(slots_R), num_drafted < self.num_draft_tokens)
