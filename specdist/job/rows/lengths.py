"""How long completions will be, as far as can be told before they are generated: the longest begin first.

A batch ends with its longest sequence, so long ones should not begin last (longest processing time first;
Graham, "Bounds on multiprocessing timing anomalies", 1969). Expected is the mean of the row's finished
samples, or else of finished rows with prompts of similar length. The order of rows changes no token in runs
of class ``tokens``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

# Before so many completions have finished, nothing is learned from them.
MIN_LEARNED = 16
# Prompts within half an octave of each other are of one kind, whose mean counts as much as so many
# completions of all kinds have.
KINDS_PER_OCTAVE, PRIOR_WEIGHT = 2, 4.0


class _Mean:
    def __init__(self) -> None:
        self.num, self.total = 0, 0.0

    def add(self, value: float) -> None:
        self.num, self.total = self.num + 1, self.total + value

    def towards(self, prior: float, weight: float) -> float:
        return (self.total + weight * prior) / (self.num + weight)


class ExpectedLengths:
    """Expected lengths of rows' completions, learned from this replica's finished ones."""

    def __init__(self, measure: Callable[[Sequence[int]], Sequence[float]]) -> None:
        """``measure``: of rows, the sizes of their prompts."""
        self._measure = measure
        self._sizes: dict[int, float] = {}
        self._of_row: defaultdict[int, _Mean] = defaultdict(_Mean)
        self._of_kind: defaultdict[int, _Mean] = defaultdict(_Mean)
        self._of_all = _Mean()
        self._learns_at = MIN_LEARNED

    def begin(self, rows: Sequence[int]) -> None:
        """These rows are to be generated."""
        self._sizes |= zip(rows, self._measure(rows), strict=True)

    def end(self, rows: Iterable[int]) -> None:
        """They are finished, or no longer this replica's."""
        for row in rows:
            self._sizes.pop(row, None)
            self._of_row.pop(row, None)

    def observe(self, row: int, num_tokens: int) -> bool:
        """Learn from a finished completion. Whether that may change the order much: it does so ever more
        seldom."""
        self._of_row[row].add(num_tokens)
        self._of_all.add(num_tokens)
        if row in self._sizes:
            self._of_kind[self._kind(row)].add(num_tokens)
        if self._of_all.num < self._learns_at:
            return False
        self._learns_at *= 2
        return True

    def longest_first(self, rows: Iterable[int]) -> list[int]:
        """Rows of which nothing is known keep their order."""
        return sorted(rows, key=self._expected, reverse=True)

    def _expected(self, row: int) -> float:
        if row in self._of_row:
            return self._of_row[row].towards(0.0, 0.0)
        if self._of_all.num < MIN_LEARNED:
            return 0.0
        overall = self._of_all.towards(0.0, 0.0)
        return self._of_kind[self._kind(row)].towards(overall, PRIOR_WEIGHT)

    def _kind(self, row: int) -> int:
        return round(KINDS_PER_OCTAVE * math.log2(1 + max(0.0, self._sizes.get(row, 0.0))))
