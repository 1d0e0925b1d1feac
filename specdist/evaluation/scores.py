"""What a task says of every row, and the figures over prompts that follow from it.

Completions of one prompt are not independent observations: every figure is a ratio of two sums over
*prompts*, and a prompt is what the bootstrap draws and what the paired test swaps.

N rows (completions), P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """Sum of ``numerators_P`` over sum of ``denominators_P``; a mean over prompts where those are ones."""

    numerators_P: np.ndarray
    denominators_P: np.ndarray

    @staticmethod
    def mean(values_P: np.ndarray) -> Metric:
        return Metric(np.asarray(values_P, np.float64), np.ones(len(values_P)))

    @property
    def value(self) -> float | None:
        """None where there is nothing to be divided by, as for likelihoods of no tokens."""
        total = self.denominators_P.sum()
        return float(self.numerators_P.sum() / total) if total else None

    def take(self, index: np.ndarray) -> Metric:
        return Metric(self.numerators_P[index], self.denominators_P[index])


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a task has found.

    Attributes:
        columns: for every row, by name: numbers, or text such as the answer that was found. A list each [N].
        metrics: over prompts, in the order of ``prompt_ids_P``.
        prompt_ids_P: row_id of every prompt, ascending.
        facts: what else belongs into the report, such as how programs were isolated.
    """

    columns: Mapping[str, list[Any]]
    metrics: Mapping[str, Metric]
    prompt_ids_P: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which prompt."""

    prompt_ids_P: np.ndarray
    index_N: np.ndarray

    @staticmethod
    def of(row_ids: list[int]) -> Groups:
        prompt_ids_P, index_N = np.unique(np.asarray(row_ids, np.int64), return_inverse=True)
        return Groups(prompt_ids_P, index_N)

    @property
    def counts_P(self) -> np.ndarray:
        return np.bincount(self.index_N, minlength=len(self.prompt_ids_P))

    def sums(self, values_N: Any) -> np.ndarray:
        """By prompt, float64 [P]."""
        values = np.asarray(values_N, np.float64)
        return np.bincount(self.index_N, weights=values, minlength=len(self.prompt_ids_P))

    def mean(self, values_N: Any) -> Metric:
        """Every prompt counts the same, however many samples it has."""
        return Metric.mean(self.sums(values_N) / self.counts_P)
