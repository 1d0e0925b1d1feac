"""A training as a picture: its loss, and what the held-out rows promise."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdist.data.store.files import write_atomically
from specdist.training.drafts.training import History

DOTS_PER_INCH = 130
LOSS_NAMES = {
    "kl": "KL(target || draft)",
    "reverse_kl": "KL(draft || target)",
    "tvd": "TVD++ (only its slope counts)",
    "cross_entropy": "cross entropy",
}


def draw_training(history: History, loss: str, path: Path) -> None:
    """Loss, acceptance and predicted speed-up over the steps; the kept draft is marked."""
    figure = Figure(figsize=(5.5, 8), layout="constrained", dpi=DOTS_PER_INCH)
    above, middle, below = figure.subplots(3, sharex=True)
    steps = [step for step, value in zip(history.steps, history.losses, strict=True) if value is not None]
    above.plot(steps, [value for value in history.losses if value is not None], ".-", color="C0")
    above.set_ylabel(f"training loss in nats per token\n{LOSS_NAMES[loss]}")
    found = history.prospects
    _mark(middle, history, [each.acceptance for each in found], "C1")
    middle.set_ylabel("acceptance of a draft token\non held-out rows")
    _mark(below, history, [each.speed_up for each in found], "C2")
    below.set_ylabel("predicted speed-up over\nplain decoding")
    below.set_xlabel("steps")
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def _mark(axes: Axes, history: History, values: list[float], colour: str) -> None:
    axes.plot(history.steps, values, ".-", color=colour)
    best = history.best
    axes.plot(history.steps[best], values[best], "o", color=colour, markersize=9, label="kept")
    axes.annotate(f"{values[0]:.2f}", (history.steps[0], values[0]), (6, 2), textcoords="offset points")
    axes.annotate(
        f"{values[best]:.2f}", (history.steps[best], values[best]), (-6, -14), textcoords="offset points",
        ha="right",
    )  # fmt: skip
    axes.legend(loc="lower right")
