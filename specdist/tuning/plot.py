"""The Pareto plot of SpecDec++ (Huang et al. 2024, Figure 3): wasted drafting against verification."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdist.data.files import write_atomically
from specdist.policies.options import TARGET_ONLY
from specdist.replay.fronts import pareto_front
from specdist.tuning.run import TuningResult

MARKERS = "os^vDPXp<>"
DOTS_PER_INCH = 150


def plot_pareto(result: TuningResult, path: Path) -> None:
    """One curve per policy through its settings that no other of its own beats in both rates."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    outcomes = result.by_policy()
    outcomes.pop(TARGET_ONLY)
    for index, policy in enumerate(sorted(outcomes)):
        found = [outcome.rates for outcome in outcomes[policy]]
        front = pareto_front(found)
        marker, color = MARKERS[index % len(MARKERS)], f"C{index}"
        axes.plot(*zip(*found, strict=True), marker, color=color, alpha=0.25, markersize=4, linestyle="none")
        axes.plot(*zip(*front, strict=True), marker=marker, color=color, markersize=6, label=policy)
    if result.oracle is not None:
        oracle = result.oracle.batched
        axes.plot(
            oracle.verification_rate, oracle.discard_rate, "*", color="black", markersize=16, label="oracle",
            clip_on=False, linestyle="none",
        )  # fmt: skip
    best = result.best
    if best.candidate.policy != TARGET_ONLY:
        axes.plot(
            best.batched.verification_rate, best.batched.discard_rate, "o", markersize=15, fillstyle="none",
            color="black", linestyle="none", label=f"most tokens/s at batch {result.config.max_num_seqs}",
        )  # fmt: skip
    axes.set_xlabel("verification rate: target passes of a row per token")
    axes.set_ylabel("discard rate: rejected draft tokens per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    sampling = f"temperature {result.config.temperature:g}" if result.config.temperature else "greedy"
    axes.set_title(
        f"{Path(result.config.target).name} with draft {Path(result.config.draft).name}, {sampling}"
    )
    canvas = FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file, metadata={}, pil_kwargs={}))
