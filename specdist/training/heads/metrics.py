"""Metrics of estimated probabilities. Imports no torch.

A label is a probability: of being accepted, or 0 or 1. One in between stands for both outcomes in these
shares, so that no outcome needs to be drawn.

M examples.
"""

from __future__ import annotations

import numpy as np


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


def area_under_curve(scores_M: np.ndarray, labels_M: np.ndarray) -> float | None:
    """Area under the ROC curve: the probability that an accepted example has a larger score than a rejected
    one, ties counted half; None if one outcome never occurs."""
    labels_M = labels_M.astype(float)
    order = np.argsort(-scores_M, kind="stable")
    # Examples with one score are called positive together.
    ends = np.append(np.flatnonzero(np.diff(scores_M[order])), len(order) - 1)
    positives, negatives = (
        np.append(0.0, weights_M[order].cumsum()[ends]) for weights_M in (labels_M, 1 - labels_M)
    )
    heights = (positives[1:] + positives[:-1]) / 2
    whole = float(positives[-1] * negatives[-1])
    return float(np.diff(negatives) @ heights) / whole if whole else None
