"""The cost of a pass: measured curves of time over size. No tensors, no clock.

The time of a pass is not linear in its tokens (weights are read from memory once per pass, and products are
computed in tiles), so it is measured at several sizes and interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specdist.utils.json_values import from_fields

# Numbers of branches per sequence among which the costs decide.
BRANCH_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Curve:
    """Nanoseconds over a size: interpolated between measured points, extrapolated with the last slope."""

    sizes: Sequence[int]
    ns: Sequence[int]

    def __call__(self, sizes: np.ndarray | float) -> np.ndarray:
        """Nanoseconds for each size; 0 for size 0, which is not a pass."""
        known, values = np.asarray(self.sizes, float), np.asarray(self.ns, float)
        wanted = np.asarray(sizes, float)
        found = np.interp(wanted, known, values)
        if len(known) > 1:
            slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
            found = found + slope * np.maximum(0.0, wanted - known[-1])
        return np.where(wanted > 0, found, 0.0)

    def look_up(self, counts: np.ndarray | int) -> np.ndarray:
        """The same for integer sizes, faster."""
        table = self._table
        largest = counts if isinstance(counts, int) else counts.max(initial=0)
        # Only passes with prompts are larger than the largest measured size.
        found: np.ndarray = table[counts] if largest < len(table) else self(counts)
        return found

    @cached_property
    def _table(self) -> np.ndarray:
        """For every size from 0 to the largest measured one."""
        return self(np.arange(max(self.sizes) + 1))


@dataclass(frozen=True)
class CostModel:
    """Costs of a replica's passes.

    Attributes:
        target: over the number of tokens of a target pass.
        draft: over the number of sequences of a draft step, one token each.
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
        """Raises ValueError for anything but the output of :meth:`to_json`."""
        costs = from_fields(CostModel, values)
        for curve in (costs.target, costs.draft):
            if not curve.sizes or len(curve.sizes) != len(curve.ns) or sorted(curve.sizes) != curve.sizes:
                raise ValueError("a curve needs a time for each of its sizes, in ascending order")
        return costs
