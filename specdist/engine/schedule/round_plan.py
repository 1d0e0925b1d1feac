"""What the scheduler has planned for a round. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdist.engine.schedule.sequence import Sequence
from specdist.models.cache.pages import PageUpdates


@dataclass(frozen=True)
class Chunk:
    """Context tokens ``begin .. end - 1`` of a sequence, to be prefilled in this pass."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def completes_context(self) -> bool:
        return self.end == self.sequence.context_length


@dataclass(frozen=True)
class RoundPlan:
    """One round: the sequences that decode, the most candidates of each, and the prompt chunks beside them.

    ``opened``: sequences that were just admitted. ``suspended_slots``: slots of those just preempted.
    """

    decoding: list[Sequence]
    draft_limits: list[int]
    chunks: list[Chunk]
    opened: list[Sequence]
    suspended_slots: list[int]
    page_updates: PageUpdates

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.chunks


def candidates_within(most: int, room: int) -> int:
    """As the completion's room allows: there is also a next token before and after them."""
    return max(0, min(most, room - 2))


def limits_within(most: int, rooms_R: np.ndarray) -> list[int]:
    """The same of R sequences."""
    limits: list[int] = np.maximum(np.minimum(rooms_R - 2, most), 0).tolist()
    return limits
