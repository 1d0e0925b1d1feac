"""The cost of a pass: measured curves of time over size. No tensors, no clock.

The time of a pass is not linear in its tokens (weights are read from memory once per pass, and products are
computed in tiles), so it is measured at several sizes and interpolated. What it adds for every token of
context is a straight line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from specdist.utils.json_values import from_fields

# Numbers of branches per sequence among which the costs decide.
BRANCH_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12)
Sizes = np.ndarray | int


def _of_pass(ns: Any, sizes: Sizes) -> Any:
    """The time of a pass: at least a nanosecond, and nothing for size 0, which is none."""
    return (max(1.0, ns) if isinstance(sizes, int) else np.maximum(1.0, ns)) * (sizes > 0)


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

    def look_up(self, counts: Sizes) -> Any:
        """The same for integer sizes, faster; a float for a single one."""
        # Only passes with prompts are larger than the largest measured size.
        if isinstance(counts, int):
            return self._values[counts] if counts < len(self._values) else float(self(counts))
        return self._table[counts] if counts.max(initial=0) < len(self._table) else self(counts)

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = self._table.tolist()
        return values

    @cached_property
    def _table(self) -> np.ndarray:
        """The times of every size from 0 to the largest measured one."""
        return self(np.arange(max(self.sizes) + 1))


@dataclass(frozen=True)
class ContextCosts:
    """What context adds to passes: keys and values are read for every sequence, and compared with every
    token.

    Attributes:
        num_tokens: context of every sequence when the curves were measured.
        num_rows: most sequences of those passes; a pass of fewer tokens had a token of each.
        target_row_ns, target_token_ns: added for every 1,000 tokens of context, by a sequence and by a token
            of the target's pass.
        draft_row_ns: the same for a sequence of a draft step; ``block_row_ns``: of a pass over blocks, which
            is a part of synchronous drafting.
    """

    num_tokens: int = 0
    num_rows: int = 1
    target_row_ns: float = 0.0
    target_token_ns: float = 0.0
    draft_row_ns: float = 0.0
    block_row_ns: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Costs of a replica's passes, and of asking a draft on a rank of its own.

    Attributes:
        target: over the number of tokens of a target pass.
        draft: over the number of sequences of a draft step, one token each.
        context: how both change with the length of the context.
        message: over the number of sequences that decode: what any round takes beyond its passes. Of a draft
            on a rank of its own, a request to it and its reply; within one process, the host's work.
        synchronous, asynchronous: over the same number: what such drafting takes, the latter with branches,
            beyond its steps and the message: time of the host in which the draft's device stands still.
    """

    target: Curve
    draft: Curve
    context: ContextCosts = field(default_factory=ContextCosts)
    message: Curve = field(default_factory=lambda: Curve([1], [0]))
    synchronous: Curve = field(default_factory=lambda: Curve([1], [0]))
    asynchronous: Curve = field(default_factory=lambda: Curve([1], [0]))

    def drafting_ns(self, num_rows: int) -> float:
        """A synchronous draft step of so many sequences, with what drafting takes beyond its steps."""
        return float(self.draft(num_rows) + self.synchronous(num_rows))

    def target_ns(self, num_tokens: Sizes, num_rows: int, num_context_tokens: float) -> Any:
        """A pass of so many tokens, those of ``num_rows`` sequences after a context of so many tokens; a
        float for a single size, quickly."""
        context, found = self.context, self.target.look_up(num_tokens)
        if not (context.target_row_ns or context.target_token_ns):
            return found
        row_ns, longer = context.target_row_ns / 1000, (num_context_tokens - context.num_tokens) / 1000
        least: Any = min if isinstance(num_tokens, int) else np.minimum
        found = found + num_rows * (row_ns * num_context_tokens)
        found = found - least(num_tokens, context.num_rows) * (row_ns * context.num_tokens)
        return _of_pass(found + num_tokens * (longer * context.target_token_ns), num_tokens)

    def draft_ns(self, num_rows: Sizes, num_context_tokens: float) -> Any:
        """A step of so many sequences and branches, each after a context of so many tokens; a float for a
        single size, quickly."""
        return self._after(self.draft, self.context.draft_row_ns, num_rows, num_context_tokens)

    def synchronous_ns(self, num_rows: Sizes, num_context_tokens: float) -> Any:
        """What synchronous drafting for so many sequences takes beyond its steps and the message; see
        :meth:`draft_ns`."""
        return self._after(self.synchronous, self.context.block_row_ns, num_rows, num_context_tokens)

    def _after(self, curve: Curve, row_ns: float, num_rows: Sizes, num_context_tokens: float) -> Any:
        found = curve.look_up(num_rows)
        if not row_ns:
            return found
        longer = (num_context_tokens - self.context.num_tokens) / 1000
        return _of_pass(found + longer * num_rows * row_ns, num_rows)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CostModel:
        """Raises ValueError for anything but the output of :meth:`to_json`."""
        costs = from_fields(CostModel, values)
        curves = (costs.target, costs.draft, costs.message, costs.synchronous, costs.asynchronous)
        for curve in curves:
            ascends = list(curve.sizes) == sorted(curve.sizes)
            if not curve.sizes or len(curve.sizes) != len(curve.ns) or not ascends:
                raise ValueError("a curve needs a time for each of its sizes, in ascending order")
        return costs


# What has been measured, to what all use.
Agree = Callable[[CostModel], CostModel]
