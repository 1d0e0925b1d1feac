"""A task's scores of rows, its figures over prompts, and their confidence intervals by the bootstrap.

Completions of a prompt are not independent, so every figure is a mean over *prompts*, which are what the
bootstrap draws: how often each *distinct* value occurs. The distribution is that of drawing prompts one by
one, but a million prompts that are right or wrong cost no more than ten. Every draw is seeded.

N rows (completions), P prompts, U distinct values, R draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The finish reason of rows that have no completion.
ERROR = "error"
CONFIDENCE = 0.95
NUM_RESAMPLES = 2_000
# Numbers drawn at a time, which bounds the memory.
BLOCK = 2**22
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


def bootstrap_interval(values_P: np.ndarray, least: float = 0.0) -> list[float] | None:
    """The interval of the mean of values from ``least`` to 1: the percentile bootstrap (Efron 1979).

    Where all values are equal, so are all resamples. Then at most a share ``1 - (alpha / 2)^(1/P)`` of all
    prompts has another value (the exact bound of Clopper and Pearson 1934 for 0 of P), which may lie anywhere
    in the range; None if the values show that this is not their range.
    """
    value, num_prompts, outside = float(values_P[0]), len(values_P), (1 - CONFIDENCE) / 2
    if np.ptp(values_P) == 0:
        others = 1 - outside ** (1 / num_prompts)
        bounds = [value - others * (value - least), value + others * (1 - value)]
        return bounds if least <= value <= 1 else None
    rng = np.random.default_rng(0)
    values_U, counts_U = np.unique(values_P, return_counts=True)
    size = max(1, BLOCK // len(values_U))
    drawn = []
    for start in range(0, NUM_RESAMPLES, size):
        num = min(size, NUM_RESAMPLES - start)
        drawn.append(rng.multinomial(num_prompts, counts_U / num_prompts, size=num) @ values_U / num_prompts)
    low, high = np.quantile(np.concatenate(drawn), [outside, 1 - outside])
    return [float(low), float(high)]


def compare_paired(first: Metric, second: Metric) -> dict[str, Any] | None:
    """Compare the prompts that both runs have; None if there are none.

    ``difference``: the first run minus the second.
    """
    _, ours, theirs = np.intersect1d(first.prompt_ids_P, second.prompt_ids_P, return_indices=True)
    if not len(ours):
        return None
    ours_P, theirs_P = first.values_P[ours], second.values_P[theirs]
    gains_P = ours_P - theirs_P
    are_shares = all(bool(((values >= 0) & (values <= 1)).all()) for values in (ours_P, theirs_P))
    is_known = are_shares or np.ptp(gains_P) > 0
    return {
        "num_prompts": len(ours),
        "first": float(ours_P.mean()),
        "second": float(theirs_P.mean()),
        "difference": float(gains_P.mean()),
        "interval": bootstrap_interval(gains_P, least=-1.0) if is_known else None,
        "num_better": int((gains_P > 0).sum()),
        "num_worse": int((gains_P < 0).sum()),
    }
