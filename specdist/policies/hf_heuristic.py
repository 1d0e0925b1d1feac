"""The heuristic of transformers (``num_assistant_tokens_schedule="heuristic"``): two more after a block that
was accepted whole, one less after any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftedRows, VerifiedBlocks

GROWTH, SHRINKAGE, FEWEST = 2, 1, 1


@dataclass(frozen=True, kw_only=True)
class HfHeuristic:
    """A row's history is the length of its next block; ``num_draft_tokens`` is the first."""

    num_draft_tokens: int
    max_draft_tokens: int
    uses_features: ClassVar[bool] = False

    @property
    def initial_history(self) -> tuple[float, ...]:
        return (self.num_draft_tokens,)

    def wants_more(self, rows: DraftedRows) -> np.ndarray:
        return rows.num_drafted < rows.histories_RH[:, 0]

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        lengths_R = blocks.histories_RH[:, 0]
        lengths_R = np.where(
            blocks.num_accepted_R == blocks.num_drafted_R,
            np.minimum(lengths_R + GROWTH, self.max_draft_tokens),
            np.maximum(lengths_R - SHRINKAGE, FEWEST),
        )
        return lengths_R[:, None]
