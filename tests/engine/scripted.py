"""A length policy whose decisions are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from specdist.policies import DraftFeatures, DraftSequences, RoundContext, VerifiedTokens, WithoutHistory


@dataclass
class Scripted(WithoutHistory):
    """Drafts so many tokens in the rounds in which it is asked, one after the other; with ``only_odd`` for
    every other slot alone."""

    lengths: Sequence[int]
    only_odd: bool = False
    max_draft_tokens: int = 3
    uses_features: ClassVar[bool] = True
    reads_head: ClassVar[bool] = False
    num_paused: int = 0
    _next: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._next = itertools.cycle(self.lengths)

    def wants_more(self, rows: DraftSequences) -> np.ndarray:
        if not rows.num_drafted:
            self._length = next(self._next)
        return (rows.num_drafted < self._length) & ((rows.slots_R % 2 == 1) | (not self.only_odd))

    def num_to_verify(
        self, features: DraftFeatures, lengths_R: np.ndarray, round: RoundContext
    ) -> np.ndarray:
        return lengths_R

    def observe_tokens(self, tokens: VerifiedTokens) -> None:
        pass

    def note_pause(self, num_rounds: int) -> None:
        self.num_paused += num_rounds
