"""A length policy whose decisions are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdist.policies import DraftSequences, LengthPolicy


@dataclass
class Scripted(LengthPolicy):
    """Drafts so many tokens in the rounds in which it is asked, one after the other; with ``only_odd`` for
    every other slot alone."""

    lengths: Sequence[int]
    only_odd: bool = False
    max_draft_tokens: int = 3
    num_paused: int = 0
    uses_features = True
    is_for_batch = True
    _next: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._next = itertools.cycle(self.lengths)

    def wants(self, rows: DraftSequences) -> np.ndarray:
        if not rows.num_drafted:
            self._length = next(self._next)
        return self._length * ((rows.slots_R % 2 == 1) | (not self.only_odd))

    def note_pause(self, num_rounds: int) -> None:
        self.num_paused += num_rounds
