"""Theory and measurement: predicted against measured time, and the papers' figures next to the run's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.data.stats.regression import NS_PER_S
from specdist.job.totals.predictions import Comparison
from specdist.job.totals.report import DRIFT, OPERATIONS, REGRESSIONS, THEORY, VERIFIER
from specdist.results.report.formats import NOTHING, duration, number, percent, words
from specdist.results.report.markup import box, left_out, paragraph, table
from specdist.results.report.panel import Panel, label_of, names
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import GREY, RUN_COLOURS, RUN_MARKERS, legend_below, one_plot

FEWEST_SHARDS = 3
ABOUT_OPERATIONS = (
    "SPRINTER's authors count the operations of a round as if all of its tokens were accepted (predicted); a "
    "run also pays for the rejected ones (measured). Attention and prompts are not counted."
)
ABOUT_VERIFIER = (
    "The verifier's figures follow from how often it passed acceptable and other tokens, according to the "
    "trace. The distance of a lossy run's distribution from the target's is the mean of 1 - min(1, P/Q) over "
    "the tokens, 0 where one did not pass (measured); Theorem 1 has f TV(P, Q) for it, the probability that "
    "a token with Q > P passed, times the distance of the two models (predicted)."
)


@dataclass(frozen=True)
class TimePerPass:
    """Seconds of a draft pass and of a target pass, and how they were determined."""

    t_draft_s: float
    t_target_s: float
    source: str


def time_per_pass(run: ReportedRun) -> TimePerPass | None:
    """By regression if the numbers of passes distinguish the two, else as timed; None without passes."""
    costs = run.summary["costs"]
    for name in ("fitted", "fitted_over_shards", "measured"):
        if (found := costs[name]) is not None:
            return TimePerPass(found["t_draft_s"], found["t_target_s"], REGRESSIONS[name])
    return None


def predicted_time(runs: Sequence[ReportedRun]) -> Panel:
    shown = [run for run in runs if len(run.shards) >= FEWEST_SHARDS and time_per_pass(run)]
    content = [_regressions(run, runs) for run in runs]
    if len(shown) < len(runs):
        missing = names([run for run in runs if run not in shown])
        needs = f"the plot needs at least {FEWEST_SHARDS} shards and as many completions"
        content.append(
            left_out(f"No points of {missing}: {needs}. Smaller --rows_per_shard gives more shards.")
        )
    return Panel(
        name="predicted-time",
        title="Predicted against measured time",
        help="Each point is a shard: the predicted time of its target and draft passes, T = t_draft × draft "
        "passes + t_target × target passes, against the measured time (without prompts, messages and "
        "waiting). On the line the two agree; points above it took longer. A pass shared by sequences of "
        "two shards counts for the older shard, and its time for both, so points of short shards scatter.",
        figure=_scatter(shown) if shown else None,
        alt="Predicted against measured seconds of every shard",
        content=content,
    )


def _scatter(runs: Sequence[ReportedRun]) -> Figure:
    figure, axes = one_plot("predicted, seconds", "measured, seconds", 3.6)
    smallest, largest = math.inf, 0.0
    for index, run in enumerate(runs):
        costs = time_per_pass(run)
        assert costs is not None
        shards = run.shards
        predicted_S = (
            costs.t_draft_s * shards["num_draft_passes"] + costs.t_target_s * shards["num_target_passes"]
        )
        measured_S = (shards["verify_ns"] + shards["draft_ns"]) / NS_PER_S
        points = np.array([predicted_S, measured_S])
        smallest, largest = min(smallest, float(points.min())), max(largest, float(points.max()))
        axes.plot(
            *points, RUN_MARKERS[index], color=RUN_COLOURS[index], alpha=0.8,
            markersize=7 if len(shards) <= 40 else 3, label=label_of(run, runs, "a shard"),
        )  # fmt: skip
    limits = (0.9 * smallest, 1.05 * largest)
    axes.plot(limits, limits, ":", color=GREY, label="predicted = measured")
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    legend_below(figure)
    return figure


def _regressions(run: ReportedRun, runs: Sequence[ReportedRun]) -> Markup:
    rows = []
    for name, label in REGRESSIONS.items():
        fit = run.summary["costs"][name]
        cells = (
            [NOTHING] * 3
            if fit is None
            else [duration(fit["t_draft_s"]), duration(fit["t_target_s"]), number(fit["r_squared"], 3)]
        )
        rows.append([label, *cells])
    parts = [table(["time per pass", "t_draft", "t_target", "R²"], rows, caption=label_of(run, runs))]
    used = time_per_pass(run)
    if used is not None:
        parts.append(paragraph(f"The plot uses the times “{used.source}”."))
    if any(run.summary["costs"][name] is None for name in REGRESSIONS):
        why = (
            f"{NOTHING}: too few samples, or draft and target passes in the same proportion everywhere (as "
            "with a fixed length), so that their two times cannot be separated."
        )
        parts.append(paragraph(why))
    return box(parts)


def theory(runs: Sequence[ReportedRun]) -> Panel:
    content: list[Markup] = []
    for run in runs:
        groups = (
            ("The papers' formulas", run.predictions.theory, THEORY),
            ("Costs frozen at the start", run.predictions.drift, DRIFT),
            ("Operations per token, as SPRINTER counts them", run.operations, OPERATIONS),
            ("The verifier, by SPRINTER's theorems", run.verifier, VERIFIER),
        )
        for title, figures, labels in groups:
            if figures:
                caption = f"{run.label}: {title}" if len(runs) > 1 else title
                content.append(_comparisons(caption, figures, labels))
        if run.predictions.best_num_draft_tokens is not None:
            told = (
                f"With α = {number(run.predictions.acceptance, 3)} and a draft step that takes "
                f"{percent(run.predictions.cost_ratio)} of a target pass, the formula's best fixed length, "
                f"drafting in turns, is {run.predictions.best_num_draft_tokens}."
            )
            content.append(paragraph(f"{run.label}: {told}" if len(runs) > 1 else told))
    if any(run.operations for run in runs):
        content.append(paragraph(ABOUT_OPERATIONS))
    if any(run.verifier for run in runs):
        content.append(paragraph(ABOUT_VERIFIER))
    return Panel(
        name="theory",
        title="Theory and measurement",
        help="What the formulas predict for a run with this acceptance α, and what was measured. A ratio far "
        "from 1 in the first table means that tokens are not independent of one another, or that time was "
        "spent on what the formulas leave out: the host, messages, waiting. The wall-time factor is the "
        "speed-up over the target alone if its passes took the same time, of the whole replica and not per "
        "device.",
        content=content,
    )


def _comparisons(
    caption: str, figures: Mapping[str, Comparison], labels: Mapping[str, tuple[str, str]]
) -> Markup:
    rows = []
    for name, figure in figures.items():
        label, style = labels[name]
        shown = [_shown(value, style) for value in (figure.predicted, figure.measured)]
        rows.append([label, *shown, number(figure.ratio)])
    return table(["", "predicted", "measured", "ratio"], rows, caption=caption)


def _shown(value: float | None, style: str) -> str:
    if value is None:
        return NOTHING
    return words(value) if style.endswith("g}") else style.format(value)
