"""ROC curves: how well scores separate accepted tokens from rejected ones. Imports no torch.

A label is a probability of acceptance. A label between 0 and 1 counts as both outcomes in these shares, which
avoids the noise of drawing an outcome.

M examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RocCurve:
    """True positive rate over false positive rate, from no example called positive to all of them."""

    false_positive_rates: np.ndarray
    true_positive_rates: np.ndarray

    @property
    def auc(self) -> float | None:
        """Probability that a positive example has a larger score than a negative one, ties counted half; None
        if one outcome never occurs."""
        widths = np.diff(self.false_positive_rates)
        heights = (self.true_positive_rates[1:] + self.true_positive_rates[:-1]) / 2
        area = float((widths * heights).sum())
        return None if math.isnan(area) else area


def roc_curve(scores_M: np.ndarray, labels_M: np.ndarray) -> RocCurve:
    """The curve of scores that should be larger for larger labels. Rates are NaN if one outcome never
    occurs."""
    labels_M = labels_M.astype(float)
    order = np.argsort(-scores_M, kind="stable")
    # Examples with one score are called positive together.
    ends = np.append(np.flatnonzero(np.diff(scores_M[order])), len(order) - 1)
    positives, negatives = (
        np.append(0.0, weights_M[order].cumsum()[ends]) for weights_M in (labels_M, 1 - labels_M)
    )
    with np.errstate(invalid="ignore"):
        return RocCurve(negatives / negatives[-1], positives / positives[-1])
