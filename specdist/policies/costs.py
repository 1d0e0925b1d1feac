"""What a pass costs: measured curves of time over size. No tensors, no clock.

The time of a pass is not a straight line over its tokens (a matrix product is read from memory once for up to
so many tokens, and computed in tiles), so it is measured at several sizes and interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specdist.utils.json_values import from_fields

# The numbers of branches per row among which the costs decide.
BRANCH_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Curve:
    """Nanoseconds over a size: straight between the measured points, and on with the last slope."""

    sizes: Sequence[int]
    ns: Sequence[int]

    def __call__(self, sizes: np.ndarray | float) -> np.ndarray:
        """Nanoseconds for each size; 0 for a size of 0, which is not a pass."""
        known, values = np.asarray(self.sizes, float), np.asarray(self.ns, float)
        asked = np.asarray(sizes, float)
        found = np.interp(asked, known, values)
        if len(known) > 1:
            slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
            found = found + slope * np.maximum(0.0, asked - known[-1])
        return np.where(asked > 0, found, 0.0)

    def look_up(self, counts: np.ndarray | int) -> np.ndarray:
        """The same of whole sizes, for callers that ask several times per drafted token."""
        table = self._table
        largest = counts if isinstance(counts, int) else counts.max(initial=0)
        # Only a pass with a prompt in it is larger than what was measured.
        found: np.ndarray = table[counts] if largest < len(table) else self(counts)
        return found

    @cached_property
    def _table(self) -> np.ndarray:
        """Of every size from 0 to the largest that was measured."""
        return self(np.arange(max(self.sizes) + 1))


@dataclass(frozen=True)
class CostModel:
    """What a replica's passes take.

    Attributes:
        target: over the tokens of a target pass.
        draft: over the rows of a draft step, of one token each.
    """

    target: Curve
    draft: Curve

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"sizes": list(curve.sizes), "ns": list(curve.ns)}
            for name, curve in (("target", self.target), ("draft", self.draft))
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CostModel:
        """Raises ValueError for what :meth:`to_json` does not give."""
        costs = from_fields(CostModel, values)
        for curve in (costs.target, costs.draft):
            if not curve.sizes or len(curve.sizes) != len(curve.ns) or sorted(curve.sizes) != curve.sizes:
                raise ValueError("a curve needs a time for each of its sizes, in ascending order")
        return costs
