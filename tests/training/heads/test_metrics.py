"""The figures against their definitions, by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from specdist.training.heads.metrics import area_under_curve, binary_kl, sigmoid
from specdist.training.heads.optimize import Objective


def brute_force_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Every pair, each as often as it is positive and negative; ties count half."""
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    weights = labels[:, None] * (1 - labels)
    return float((wins * weights).sum() / weights.sum())


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_auc_is_that_of_all_pairs(is_soft: bool, has_ties: bool) -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=200)
    if has_ties:
        scores = scores.round(0)
    labels = sigmoid(scores + generator.normal(size=200))
    if not is_soft:
        labels = (labels > 0.5).astype(float)
    assert area_under_curve(scores, labels) == pytest.approx(brute_force_auc(scores, labels), abs=1e-12)
    assert area_under_curve(scores, np.ones(200)) is None


def test_the_divergence_is_its_formula_and_0_where_both_agree() -> None:
    labels, logits = np.array([0.2, 0.9, 0.0, 1.0]), np.array([0.3, -1.0, -2.0, 5.0])
    p, q = labels, 1 / (1 + np.exp(-logits))
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.nan_to_num(p * np.log(p / q)) + np.nan_to_num((1 - p) * np.log((1 - p) / (1 - q)))
    assert binary_kl(logits, labels) == pytest.approx(terms.mean())
    inner = np.array([0.2, 0.9, 0.5])
    assert binary_kl(np.log(inner / (1 - inner)), inner) == pytest.approx(0, abs=1e-12)


def test_losses_do_not_overflow() -> None:
    objective = Objective(labels=lambda examples: examples.column("acceptance"), rejected_weight=6)
    assert objective.mean_loss(np.array([1000.0, -1000.0]), np.array([0.0, 1.0])) == (6000 + 1000) / 2
    assert sigmoid(np.array([-1000.0, 1000.0])).tolist() == [0, 1]
