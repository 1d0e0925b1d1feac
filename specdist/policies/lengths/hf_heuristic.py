"""The heuristic of transformers (``num_assistant_tokens_schedule="heuristic"``): two more after a fully
accepted block, one less after any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specdist.policies.base import DraftSequences, VerifiedBlocks
from specdist.policies.options import (
    FIRST_DRAFT_TOKENS,
    FIRST_LENGTHS,
    MAX_DRAFT_TOKENS,
    Grid,
    RegisteredPolicy,
    shared_option,
)

GROWTH, SHRINKAGE, FEWEST = 2, 1, 1


@dataclass(frozen=True, kw_only=True)
class HfHeuristic(RegisteredPolicy):
    """A sequence's history is the length of its next block; ``num_draft_tokens`` is the first."""

    num_draft_tokens: int = shared_option(FIRST_DRAFT_TOKENS)
    max_draft_tokens: int = shared_option(MAX_DRAFT_TOKENS)
    name = "hf_heuristic"
    drafts = "2 more after a block that was accepted whole, else 1 less (transformers)"
    grid: ClassVar[Grid] = {"num_draft_tokens": FIRST_LENGTHS}
    uses_features = False

    @property
    def initial_history(self) -> tuple[float, ...]:
        return (self.num_draft_tokens,)

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        return rows.num_drafted < rows.histories_RH[:, 0]

    def next_histories(self, blocks: VerifiedBlocks) -> np.ndarray:
        lengths_R = blocks.histories_RH[:, 0]
        lengths_R = np.where(
            blocks.num_accepted_R == blocks.num_drafted_R,
            np.minimum(lengths_R + GROWTH, self.max_draft_tokens),
            np.maximum(lengths_R - SHRINKAGE, FEWEST),
        )
        return lengths_R[:, None]
