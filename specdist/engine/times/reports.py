"""What rounds report besides tokens: times, passes, the outcome of the work ahead.

R sequences that decode.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from specdist.data.stats.fields import DraftTimes
from specdist.data.stats.shard import AheadOutcome


@dataclass
class RoleTimes(DraftTimes):
    """Nanoseconds that the draft's side has spent since its last reply, and its peak memory."""

    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class DraftSteps:
    """What the draft has counted since its last reply, by the names of :class:`Stats`."""

    num_draft_row_steps: int = 0
    num_empty_draft_steps: int = 0
    num_forced_draft_tokens: int = 0


NO_DRAFT_STEPS = DraftSteps()


class PassCounts:
    """The draft's passes since the last reply."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._num_row_steps = self._num_drafted = self._num_forced = 0

    def count(self, num_tokens: int, num_row_steps: int) -> None:
        """A pass over so many tokens, for so many sequences and branches; without tokens, none was needed."""
        if num_tokens:
            self._sizes.append(num_tokens)
        self._num_row_steps += num_row_steps

    def count_drafted(self, num_drafted_R: np.ndarray) -> None:
        """The tokens that these passes have drafted."""
        self._num_drafted += int(num_drafted_R.sum())

    def count_forced(self, num_tokens: int) -> None:
        """Count drafted tokens that needed no pass."""
        self._num_forced += num_tokens

    def take(self) -> tuple[np.ndarray, DraftSteps]:
        """Tokens of every pass, and what the passes were for."""
        steps = DraftSteps(
            self._num_row_steps,
            self._num_row_steps + self._num_forced - self._num_drafted,
            self._num_forced,
        )
        sizes_P = np.array(self._sizes, np.int64)
        self._sizes, self._num_row_steps, self._num_drafted, self._num_forced = [], 0, 0, 0
        return sizes_P, steps


@dataclass(frozen=True)
class AheadReport:
    """The outcome of the work ahead, for every sequence that decodes.

    Attributes:
        num_tokens_R: tokens that had been drafted ahead.
        is_hit_R: the first of them is the next token and the others are the candidates; else they are
            dropped.
        num_branches_R: branches that had been prepared.
        num_branch_tokens_R: tokens of those that have not become candidates.
        is_caught_R: whether one of them has become the candidates.
    """

    num_tokens_R: np.ndarray
    is_hit_R: np.ndarray
    num_branches_R: np.ndarray
    num_branch_tokens_R: np.ndarray
    is_caught_R: np.ndarray

    @staticmethod
    @functools.cache
    def nothing(num_seqs: int) -> AheadReport:
        """The report of a draft that did not work ahead; nobody writes to it."""
        none_R = np.zeros(num_seqs, np.int64)
        return AheadReport(none_R, none_R.astype(bool), none_R, none_R, none_R.astype(bool))

    def outcomes(self) -> list[AheadOutcome]:
        """Sequence by sequence."""
        columns = (column.tolist() for column in vars(self).values())
        return [AheadOutcome(*values) for values in zip(*columns, strict=True)]
