"""The time of each role by kind of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specdist.data.stats.regression import NS_PER_S
from specdist.results.report.formats import NOTHING, duration, percent, size
from specdist.results.report.markup import Content, noted, paragraph, table
from specdist.results.report.panel import Panel, label_of, table_by_run
from specdist.results.report.runs import ReportedRun
from specdist.results.report.style import LIGHT_COLOURS, WORK_COLOURS, new_figure

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
