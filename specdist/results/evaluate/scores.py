"""A task's scores of rows, and its figures over prompts.

Completions of a prompt are not independent, so every figure is a mean over *prompts*, which are what the
bootstrap draws.

N rows (completions), P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The finish reason of rows that have no completion.
ERROR = "error"
# Columns of every result.
IDENTITY_COLUMNS = ("row_id", "sample_index", "finish_reason")


@dataclass(frozen=True)
class Metric:
    """The mean of ``values_P`` over the prompts with these row_ids, which ascend."""

    prompt_ids_P: np.ndarray
    values_P: np.ndarray

    @staticmethod
    def of(row_ids_N: Sequence[int], values_N: Sequence[float]) -> Metric:
        """The mean over prompts of each prompt's mean over its samples."""
        prompt_ids_P, index_N, counts_P = np.unique(
            np.asarray(row_ids_N, np.int64), return_inverse=True, return_counts=True
        )
        sums_P = np.bincount(index_N, weights=np.asarray(values_N, np.float64), minlength=len(prompt_ids_P))
        return Metric(prompt_ids_P, sums_P / counts_P)

    @property
    def value(self) -> float:
        return float(self.values_P.mean())


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A task's result.

    Attributes:
        columns: by name, a list [N] of numbers, or of texts such as the answers that were found.
        metrics: by name.
        facts: more for the report, such as how programs ended.
    """

    columns: Mapping[str, list[Any]]
    metrics: Mapping[str, Metric]
    facts: Mapping[str, Any] = field(default_factory=dict)


# A task's function checks columns, packages and functions of one run, and returns what scores it: so that
# nothing is scored, or run, before both runs of a comparison are known to be right.
Scoring = Callable[[], Scores]


def identity_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns that every result has."""
    return {name: [row[name] for row in rows] for name in IDENTITY_COLUMNS}
