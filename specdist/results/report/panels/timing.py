"""The time of each role by kind of work; predicted times, by the papers' formulas and by measured costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specdist.data.stats.regression import NS_PER_S
from specdist.job.totals.predictions import Comparison
from specdist.job.totals.report import DRIFT, REGRESSIONS, THEORY
from specdist.results.report.formats import NOTHING, duration, number, percent, size
from specdist.results.report.markup import Content, box, left_out, noted, paragraph, table
from specdist.results.report.panel import Panel, label_of, names, table_by_run
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import (
    GREY,
    LIGHT_COLOURS,
    RUN_COLOURS,
    RUN_MARKERS,
    WORK_COLOURS,
    legend_below,
    new_figure,
    one_plot,
)

MEANINGS = {
    "verify": "target passes over drafted tokens",
    "draft": "draft steps",
    "prefill": "passes over prompts",
    "transfer": "messages between ranks",
    "host": "scheduling, committing, bookkeeping",
    "idle": "waiting for the other role",
}
ROLES = ("target", "draft")
# The smallest share of a bar that has room for its label.
LABELLED_SHARE = 0.075


def times_by_role(run: ReportedRun) -> Mapping[str, Mapping[str, int]]:
    """Nanoseconds by role and kind of work."""
    roles = {
        "target": dataclasses.asdict(run.total.target_ns),
        "draft": dataclasses.asdict(run.total.draft_ns),
    }
    return {
        role: {kind: ns for kind in WORK_COLOURS if (ns := times.get(kind, 0))}
        for role, times in roles.items()
        if sum(times.values())
    }


def time_per_role(runs: Sequence[ReportedRun]) -> Panel:
    kinds = [
        kind for kind in WORK_COLOURS if any(kind in t for run in runs for t in times_by_role(run).values())
    ]
    content: list[Markup] = [_role_table(role, runs, kinds) for role in ROLES if _runs_with(role, runs)]
    peaks = [(f"peak memory of a {role} rank", lambda run, role=role: _peak(run, role)) for role in ROLES]
    content.append(table_by_run("memory", runs, peaks))
    if any(run.is_colocated and run.has_drafts for run in runs):
        content.append(
            paragraph("Where the draft shares rank 0 with the target, the target's idle time is its work.")
        )
    return Panel(
        name="time-per-role",
        title="Where the time went",
        help="What the target's rank 0 and the draft's rank did, as shares of the time of all shards. Grey "
        "is waiting: much of it on the target side means that drafting is slow.",
        figure=_figure(runs, kinds),
        alt="Shares of each role's time by kind of work",
        content=content,
    )


def _figure(runs: Sequence[ReportedRun], kinds: Sequence[str]) -> Figure:
    bars = [
        (f"{label_of(run, runs)}\n{role}".strip(), times)
        for run in runs
        for role, times in times_by_role(run).items()
    ]
    figure = new_figure(1.5 + 0.55 * len(bars))
    axes = figure.add_subplot()
    for place, (_, times) in enumerate(bars):
        left, whole = 0.0, sum(times.values())
        for kind in kinds:
            share = times.get(kind, 0) / whole
            axes.barh(place, share, left=left, height=0.7, color=WORK_COLOURS[kind], edgecolor="white")
            if share >= LABELLED_SHARE:
                colour = "black" if WORK_COLOURS[kind] in LIGHT_COLOURS else "white"
                axes.text(left + share / 2, place, f"{share:.0%}", color=colour, ha="center", va="center")
            left += share
    axes.set_yticks(range(len(bars)), labels=[label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the time")
    axes.grid(visible=False)
    handles = [Patch(color=WORK_COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _runs_with(role: str, runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    return [run for run in runs if role in times_by_role(run)]


def _role_table(role: str, runs: Sequence[ReportedRun], kinds: Sequence[str]) -> Markup:
    """The time and share of the role's kinds of work in each run."""
    shown = _runs_with(role, runs)
    rows = [
        [noted(kind, MEANINGS[kind]), *(_cell(times_by_role(run)[role], kind) for run in shown)]
        for kind in kinds
        if any(kind in times_by_role(run)[role] for run in shown)
    ]
    return table([role, *(label_of(run, runs, "time and share") for run in shown)], rows)


def _cell(times: Mapping[str, int], kind: str) -> Content:
    spent = times.get(kind, 0)
    if not spent:
        return NOTHING
    return noted(duration(spent / NS_PER_S), percent(spent / sum(times.values())))


def _peak(run: ReportedRun, role: str) -> str:
    num_bytes = getattr(run.total.peak_memory_bytes, role)
    return size(num_bytes) if num_bytes else NOTHING


FEWEST_SHARDS = 3


def source_of_times(run: ReportedRun) -> str | None:
    """How the seconds of a pass are known: by the first regression whose numbers of passes distinguish draft
    and target, else as timed; None without passes."""
    found = run.summary["costs"]
    order = ("fitted", "fitted_over_shards", "measured")
    return next((name for name in order if found[name] is not None), None)


def predicted_time(runs: Sequence[ReportedRun]) -> Panel:
    shown = [run for run in runs if len(run.shards) >= FEWEST_SHARDS and source_of_times(run)]
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
        costs, shards = run.summary["costs"][source_of_times(run)], run.shards
        predicted_S = (
            costs["t_draft_s"] * shards["num_draft_passes"]
            + costs["t_target_s"] * shards["num_target_passes"]
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
    used = source_of_times(run)
    if used is not None:
        parts.append(paragraph(f"The plot uses the times “{REGRESSIONS[used]}”."))
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
        )
        for title, figures, labels in groups:
            if figures:
                caption = f"{run.label}: {title}" if len(runs) > 1 else title
                content.append(_comparisons(caption, figures, labels))
        if run.predictions.best_num_draft_tokens is not None:
            told = (
                f"With α = {number(run.predictions.acceptance, 3)} and a draft step that takes "
                f"{percent(run.predictions.cost_ratio)} of a target pass, the formula's best fixed length, "
                f"drafting synchronously, is {run.predictions.best_num_draft_tokens}."
            )
            content.append(paragraph(f"{run.label}: {told}" if len(runs) > 1 else told))
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
    return style.format(value)
