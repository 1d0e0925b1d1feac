"""Metrics of estimated probabilities. Imports no torch.

A label is a probability: of being accepted, or 0 or 1. One in between stands for both outcomes in these
shares, so that no outcome needs to be drawn.

M examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_BINS = 10


def binary_kl(logits_M: np.ndarray, labels_M: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of estimates from labels, in nats (SpecDec++, appendix D.3)."""
    labels_M, logits_M = labels_M.astype(float), logits_M.astype(float)
    losses_M = labels_M * np.logaddexp(0, -logits_M) + (1 - labels_M) * np.logaddexp(0, logits_M)
    return float((losses_M - _entropy(labels_M) - _entropy(1 - labels_M)).mean())


def _entropy(probabilities_M: np.ndarray) -> np.ndarray:
    """-p log p, 0 at p = 0."""
    positive_M = np.where(probabilities_M > 0, probabilities_M, 1.0)
    return -probabilities_M * np.log(positive_M)


def sigmoid(logits_M: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits_M.astype(float)))


@dataclass(frozen=True)
class Calibration:
    """Mean estimate and mean label in bins of equal width; NaN where a bin is empty."""

    estimates: np.ndarray
    labels: np.ndarray
    counts: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of the two over the examples."""
        is_full = self.counts > 0
        distances = np.abs(self.estimates - self.labels)[is_full]
        return float((distances * self.counts[is_full]).sum() / self.counts.sum())


def calibration(estimates_M: np.ndarray, labels_M: np.ndarray) -> Calibration:
    """The calibration of estimates in [0, 1]."""
    bins_M = np.minimum((estimates_M * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins_M, minlength=NUM_BINS)
    with np.errstate(invalid="ignore"):
        estimates, labels = (
            np.bincount(bins_M, weights=values_M, minlength=NUM_BINS) / counts
            for values_M in (estimates_M, labels_M)
        )
    return Calibration(estimates, labels, counts)
