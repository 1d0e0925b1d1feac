"""A task's scores of rows, and its figures over prompts.

Completions of a prompt are not independent, so every figure is a ratio of two sums over *prompts*, which are
what the bootstrap draws and the paired test swaps.

N rows (completions), P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """The sum of ``numerators_P`` over that of ``denominators_P``; with denominators of 1 a mean."""

    numerators_P: np.ndarray
    denominators_P: np.ndarray

    @staticmethod
    def mean(values_P: np.ndarray) -> Metric:
        return Metric(np.asarray(values_P, np.float64), np.ones(len(values_P)))

    @property
    def value(self) -> float | None:
        """None if the denominators sum to 0, as for likelihoods without tokens."""
        total = self.denominators_P.sum()
        return float(self.numerators_P.sum() / total) if total else None

    def take(self, index: np.ndarray) -> Metric:
        return Metric(self.numerators_P[index], self.denominators_P[index])


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A task's result.

    Attributes:
        columns: by name, a list [N] of numbers, or of texts such as the answers that were found.
        metrics: by name, over prompts in the order of ``prompt_ids_P``.
        prompt_ids_P: row_id of every prompt, ascending.
        facts: more for the report, such as how programs were isolated.
    """

    columns: Mapping[str, list[Any]]
    metrics: Mapping[str, Metric]
    prompt_ids_P: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Groups:
    """The rows of each prompt."""

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
        """The values' sums by prompt, float64 [P]."""
        values = np.asarray(values_N, np.float64)
        return np.bincount(self.index_N, weights=values, minlength=len(self.prompt_ids_P))

    def mean(self, values_N: Any) -> Metric:
        """The mean over prompts of each prompt's mean over its samples."""
        return Metric.mean(self.sums(values_N) / self.counts_P)
