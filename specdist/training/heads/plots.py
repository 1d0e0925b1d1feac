"""Plots of a training: loss curves, calibration and ROC curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdist.data.store.files import write_atomically
from specdist.models.heads.roc import RocCurve
from specdist.training.heads.metrics import Calibration
from specdist.training.heads.optimize import History

DOTS_PER_INCH = 130


def plot_curves(histories: Mapping[str, History], path: Path) -> None:
    """Loss by epoch on the training and the held-out rows: a pair of lines per training."""
    figure, axes = _square()
    for index, (label, history) in enumerate(histories.items()):
        color = f"C{index}"
        axes.plot(history.epochs, history.training, ".--", color=color, label=f"{label}training")
        axes.plot(history.epochs, history.evaluation, ".-", color=color, label=f"{label}held-out rows")
    axes.set_xlabel("epochs")
    axes.set_ylabel("loss in nats per token")
    _write(figure, axes, path)


def plot_calibration(found: Calibration, label: str, path: Path) -> None:
    """Mean label by estimate, and how often each estimate was made."""
    figure, axes = _square()
    axes.plot([0, 1], [0, 1], ":", color="gray")
    axes.plot(found.estimates, found.labels, "o-", label=label)
    width = 1 / len(found.counts)
    shares = found.counts / found.counts.sum()
    places = [(index + 0.5) * width for index in range(len(shares))]
    axes.bar(places, shares, width=0.9 * width, color="C0", alpha=0.2, label="share of the tokens")
    axes.set_xlabel("estimate")
    axes.set_ylabel("mean label")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    _write(figure, axes, path)


def plot_roc(curves: Mapping[str, RocCurve], path: Path) -> None:
    """True against false positive rates, with the areas in the legend."""
    figure, axes = _square()
    axes.plot([0, 1], [0, 1], ":", color="gray")
    for label, curve in curves.items():
        area = "none" if curve.auc is None else f"{curve.auc:.3f}"
        axes.plot(curve.false_positive_rates, curve.true_positive_rates, label=f"{label}: AUC {area}")
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    _write(figure, axes, path)


def _square() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.5, 5), layout="constrained", dpi=DOTS_PER_INCH)
    return figure, figure.add_subplot()


def _write(figure: Figure, axes: Axes, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
