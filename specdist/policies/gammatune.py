"""GammaTune (Gautam, Shrestha, Reddy 2025): the length follows a moving average of what was accepted.

Algorithm 1, with A accepted of the row's last block:

    A <- A + δ                                       if all of the block was accepted
    w <- min(γ_max, max(γ_min, (1 - η) w + η A))
    γ <- ceil(w)

A block may be shorter than γ, where γ would reach beyond the row's end or further ahead than the draft works.
"All of it" then means what was drafted, as in transformers' heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, VerifiedBlocks


@dataclass(frozen=True, kw_only=True)
class GammaTune:
    """A row's history is its window w, which begins at ``num_draft_tokens``.

    Attributes:
        min_draft_tokens, max_draft_tokens: γ_min, γ_max.
        length_bonus: δ.
        length_rate: η.
    """

    num_draft_tokens: int
    min_draft_tokens: int
    max_draft_tokens: int
    length_bonus: float
    length_rate: float
    uses_features: ClassVar[bool] = False

    @property
    def initial_history(self) -> tuple[float, ...]:
        return (self.num_draft_tokens,)

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        return rows.num_drafted < np.ceil(rows.histories_RH[:, 0])

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        is_whole_R = blocks.num_accepted_R == blocks.num_drafted_R
        accepted_R = blocks.num_accepted_R + np.where(is_whole_R, self.length_bonus, 0.0)
        windows_R = blocks.histories_RH[:, 0]
        # In this form a window that is where it is drawn to stays there to the last bit, below the ceiling.
        windows_R = windows_R + self.length_rate * (accepted_R - windows_R)
        return np.clip(windows_R, self.min_draft_tokens, self.max_draft_tokens)[:, None]
