"""Figures and curves of a trained head on held-out rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdist.models.heads.head import TokenHead
from specdist.models.heads.info import HeadKind
from specdist.models.heads.roc import RocCurve, roc_curve
from specdist.training.heads.data import ExampleSet
from specdist.training.heads.metrics import binary_kl, calibration, sigmoid
from specdist.training.heads.optimize import History, Objective, estimate

# The draft's own features as scores, with the sign that makes larger better.
BASELINES = {"entropy": -1, "top_probability": 1, "probability": 1}
# SPRINTER's tau, for which its rates are reported.
VERIFIER_THRESHOLD = 0.5


@dataclass(frozen=True)
class Trained:
    """A trained head, its losses, and what it says of the held-out rows, beside their labels."""

    head: TokenHead
    objective: Objective
    history: History
    logits_M: np.ndarray
    labels_M: np.ndarray

    @property
    def curve(self) -> RocCurve:
        return roc_curve(self.logits_M, self.labels_M)


def baseline_curves(examples: ExampleSet, labels_M: np.ndarray) -> dict[str, RocCurve]:
    """The ROC curves of the draft's own features as scores."""
    return {name: roc_curve(sign * examples.column(name), labels_M) for name, sign in BASELINES.items()}


def head_metrics(
    kind: HeadKind, trained: Trained, training: ExampleSet, evaluation: ExampleSet
) -> dict[str, Any]:
    """Figures for the head's file, on the held-out rows unless their name says training."""
    objective, logits_M, labels_M = trained.objective, trained.logits_M, trained.labels_M
    training_logits_M = estimate(trained.head, training)
    training_labels_M = objective.labels(training, slice(None))
    estimates_M = sigmoid(logits_M)
    found: dict[str, Any] = {
        "num_training_examples": len(training_logits_M),
        "num_examples": len(logits_M),
        "mean_label": float(labels_M.mean()),
        "mean_estimate": float(estimates_M.mean()),
        "training_loss": objective.mean_loss(training_logits_M, training_labels_M),
        "loss": objective.mean_loss(logits_M, labels_M),
        "training_kl": binary_kl(training_logits_M, training_labels_M),
        "kl": binary_kl(logits_M, labels_M),
        "calibration_error": calibration(estimates_M, labels_M).error,
        "auc": trained.curve.auc,
        "baseline_auc": {name: each.auc for name, each in baseline_curves(evaluation, labels_M).items()},
    }
    return found | (_verifier_metrics(evaluation, logits_M, labels_M) if kind == "verifier" else {})


def _verifier_metrics(evaluation: ExampleSet, logits_M: np.ndarray, labels_M: np.ndarray) -> dict[str, Any]:
    """SPRINTER's rates at its threshold, and the AUC of each kind of prefix."""
    approved_M = sigmoid(logits_M) >= VERIFIER_THRESHOLD
    kinds_M = evaluation.column("prefix_kind")
    return {
        "threshold": VERIFIER_THRESHOLD,
        "true_positive_rate": _share(approved_M[labels_M == 1]),
        "false_positive_rate": _share(approved_M[labels_M == 0]),
        "auc_per_prefix_kind": {
            kind: roc_curve(logits_M[kinds_M == kind], labels_M[kinds_M == kind]).auc
            for kind in sorted(set(kinds_M.tolist()))
        },
    }


def _share(flags_M: np.ndarray) -> float | None:
    return float(flags_M.mean()) if len(flags_M) else None
