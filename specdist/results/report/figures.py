"""The six figures of a report, each of one run or of several beside one another.

S shards, E edges of intervals, T times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specdist.data.stats.fields import DraftTimes, TargetTimes
from specdist.data.stats.shard import Stats
from specdist.results.report.runs import FinishedShard, ReportedRun
from specdist.results.report.style import (
    LIGHT_COLOURS,
    RUN_COLOURS,
    RUN_MARKERS,
    WORK_COLOURS,
    from_zero,
    legend_below,
    new_figure,
    one_plot,
    percent_axis,
    report_style,
    whole_numbers,
)

MAX_INTERVALS = 60
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MAX_THICK_LINES = 60
# The smallest share of a bar that has room for its label.
LABELLED_SHARE = 0.075
NUM_ENTROPY_GROUPS = 10
MAX_LENGTH_BINS = 40


def make_figures(runs: Sequence[ReportedRun]) -> dict[str, Figure | None]:
    """All six by name, in the order of the page; None where no run has anything to show."""
    timed = [run for run in runs if run.span_s]
    drafting = [run for run in runs if run.has_drafts]
    completed = [run for run in runs if len(run.lengths)]
    with report_style():
        return {
            "speed-over-time": speed_over_time(timed) if timed else None,
            "shards": shard_times(timed) if timed else None,
            "time-per-role": time_per_role(timed) if timed else None,
            "block-lengths": block_lengths(drafting) if drafting else None,
            "acceptance": acceptance(drafting) if drafting else None,
            "completion-lengths": completion_lengths(completed) if completed else None,
        }


def over_time(
    shards: Sequence[FinishedShard], num_intervals: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of equal intervals, in seconds since the first request; in each, tokens/s of all replicas, and
    tokens per second of a replica's work, NaN if none worked.

    Each shard's tokens and work are spread over the time from its first request to its last completion. A
    replica begins a shard while rows of the last one still run: its open shards share its speed equally. The
    intervals add up to all tokens.
    """
    timed = [shard for shard in shards if shard.span_s is not None]
    spans_S2 = np.array([shard.span_s for shard in timed])
    first = spans_S2.min()
    edges = np.linspace(first, spans_S2.max(), num_intervals + 1)
    amounts_2S = np.array([(shard.stats.num_completion_tokens, shard.work_s) for shard in timed]).T
    replicas_S = np.array([shard.replica for shard in timed])
    done_2E = np.zeros((2, num_intervals + 1))
    for replica in np.unique(replicas_S):
        is_its_S = replicas_S == replica
        done_2E += _progress(spans_S2[is_its_S], edges, amounts_2S[:, is_its_S])
    tokens, work_s = np.diff(done_2E)
    per_work_s = np.divide(tokens, work_s, out=np.full(num_intervals, np.nan), where=work_s > 1e-9)
    return edges - first, tokens / np.diff(edges), per_work_s


def _progress(spans_S2: np.ndarray, edges_E: np.ndarray, amounts_2S: np.ndarray) -> np.ndarray:
    """[2, E] how much of the amounts of a replica's shards is done at each edge: open shards share its
    speed."""
    times_T, places_S2 = np.unique(spans_S2, return_inverse=True)
    begins_S, ends_S = places_S2.reshape(-1, 2).T
    size = len(times_T)
    num_open_T = np.cumsum(np.bincount(begins_S, minlength=size) - np.bincount(ends_S, minlength=size))
    pace_T = np.diff(times_T) * (num_open_T[:-1] > 0) / np.maximum(1, num_open_T[:-1])
    done_T = np.concatenate([[0.0], np.cumsum(pace_T)])
    done_E = np.interp(edges_E, times_T, done_T)
    begins_S1 = done_T[begins_S][:, None]
    whole_S1 = done_T[ends_S][:, None] - begins_S1
    is_done_SE = (done_E - begins_S1) / np.where(whole_S1 > 0, whole_S1, np.inf)
    done_2E: np.ndarray = amounts_2S @ np.clip(is_done_SE, 0.0, 1.0)
    return done_2E


def speed_over_time(runs: Sequence[ReportedRun]) -> Figure:
    """Tokens per second of all replicas, and per device at work; dotted lines are means."""
    unit_s, unit = _time_unit(runs)
    figure = new_figure(4.4)
    above, below = figure.subplots(2, 1, sharex=True)
    for run in runs:
        num_intervals, colour = min(MAX_INTERVALS, 8 + 2 * len(run.shards)), RUN_COLOURS[run.place]
        edges_s, rates, work_rates = over_time(run.shards, num_intervals)
        look: dict[str, Any] = {"edges": edges_s / unit_s, "baseline": None, "color": colour, "linewidth": 2}
        above.stairs(rates, **look, label=run.label)
        below.stairs(work_rates / run.num_devices, **look)
        above.axhline(run.clock_tokens_per_s or 0.0, color=colour, linestyle=":", linewidth=1.4)
        mean = run.summary["tokens_per_s_per_device"] or 0.0
        below.axhline(mean, color=colour, linestyle=":", linewidth=1.4)
    above.set_ylabel("tokens/s")
    below.set_ylabel("tokens/s per rank or GPU")
    below.set_xlabel(f"{unit} since the first request")
    below.set_xlim(left=0)
    from_zero(above)
    from_zero(below)
    _legend(figure, runs)
    return figure


def shard_times(runs: Sequence[ReportedRun]) -> Figure:
    """When each shard was worked on, and how fast; of a single run in colours of its replicas."""
    unit_s, unit = _time_unit(runs)
    figure, axes = one_plot(f"{unit} since the first request", "tokens/s of a shard")
    for run in runs:
        begin_s = min(shard.span_s[0] for shard in run.shards if shard.span_s)
        groups = {run.label: run.shards}
        if len(runs) == 1 and len(run.replicas) <= len(RUN_COLOURS):
            groups = {name: [each for each in run.shards if each.replica == name] for name in run.replicas}
        for place, (label, shards) in enumerate(groups.items(), start=run.place):
            timed = [shard for shard in shards if shard.span_s is not None]
            spans_S2 = (np.array([shard.span_s for shard in timed]).reshape(-1, 2) - begin_s) / unit_s
            speeds, colour = [shard.tokens_per_s for shard in timed], RUN_COLOURS[place]
            width = 3.0 if len(run.shards) <= MAX_THICK_LINES else 1.2
            axes.hlines(speeds, spans_S2[:, 0], spans_S2[:, 1], color=colour, linewidth=width, label=label)
            axes.plot(spans_S2[:, 1], speeds, ".", color=colour, markersize=3 * width)
    axes.set_xlim(left=0)
    from_zero(axes)
    if len(runs) > 1 or len(groups) > 1:
        legend_below(figure)
    return figure


def times_by_role(run: ReportedRun) -> Mapping[str, Mapping[str, int]]:
    """Nanoseconds by role and kind of work, without kinds that took none."""
    times: dict[str, TargetTimes | DraftTimes] = {
        "target": run.total.target_ns,
        "draft": run.total.draft_ns,
    }
    return {
        role: {kind: ns for kind in WORK_COLOURS if (ns := dataclasses.asdict(found).get(kind, 0))}
        for role, found in times.items()
        if found.total
    }


def time_per_role(runs: Sequence[ReportedRun]) -> Figure:
    """Shares of the time of the target's rank 0 and of the draft's rank."""
    bars = [
        (f"{run.label if len(runs) > 1 else ''}\n{role}".strip(), times)
        for run in runs
        for role, times in times_by_role(run).items()
    ]
    figure = new_figure(1.5 + 0.55 * len(bars))
    axes = figure.add_subplot()
    for place, (_, times) in enumerate(bars):
        _draw_bar(axes, place, times)
    axes.set_yticks(range(len(bars)), labels=[label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the time")
    axes.grid(visible=False)
    kinds = [kind for kind in WORK_COLOURS if any(kind in times for _, times in bars)]
    handles = [Patch(color=WORK_COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _draw_bar(axes: Axes, place: int, times: Mapping[str, int]) -> None:
    left, whole = 0.0, sum(times.values())
    for kind, ns in times.items():
        share = ns / whole
        axes.barh(place, share, left=left, height=0.7, color=WORK_COLOURS[kind], edgecolor="white")
        if share >= LABELLED_SHARE:
            colour = "black" if WORK_COLOURS[kind] in LIGHT_COLOURS else "white"
            axes.text(left + share / 2, place, f"{share:.0%}", color=colour, ha="center", va="center")
        left += share


def block_lengths(runs: Sequence[ReportedRun]) -> Figure:
    """How many tokens the blocks had, and how many of them were accepted."""
    figure, axes = one_plot("tokens of a block", "share of blocks")
    for run in runs:
        total, name = run.total, run.label if len(runs) > 1 else ""
        for counts, label, style in (
            (total.draft_length_histogram, "drafted", ":"),
            (total.accepted_length_histogram, "accepted", "-"),
        ):
            axes.plot(
                np.array(counts) / total.num_drafts, style, marker=RUN_MARKERS[run.place],
                color=RUN_COLOURS[run.place], label=f"{name} {label}".strip(),
            )  # fmt: skip
    from_zero(axes)
    percent_axis(axes)
    whole_numbers(axes)
    legend_below(figure)
    return figure


def accepted_share_per_position(stats: Stats) -> np.ndarray:
    """The share of the tokens drafted at each position of a block that were accepted."""
    lengths = np.array(stats.draft_length_histogram, np.int64)
    drafted = np.cumsum(lengths[::-1])[::-1][1:]
    accepted = np.zeros(len(drafted))
    accepted[: len(stats.num_accepted_tokens_per_pos)] = stats.num_accepted_tokens_per_pos
    return accepted / drafted


def accepted_share_by_entropy(trace: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Verified tokens in groups of equally many by their entropy: the mean entropy of each group, and the
    share of it that was accepted."""
    entropies = trace["entropy"].to_numpy()
    is_accepted = trace["is_accepted"].to_numpy()
    order = np.argsort(entropies, kind="stable")
    groups = np.array_split(order, min(NUM_ENTROPY_GROUPS, len(order)))
    means = [np.array([values[group].mean() for group in groups]) for values in (entropies, is_accepted)]
    return means[0], means[1]


def acceptance(runs: Sequence[ReportedRun]) -> Figure:
    """Shares of accepted tokens, by position in the block, and by the draft's entropy where it is traced."""
    has_trace = any(run.trace is not None for run in runs)
    figure = new_figure(5.0 if has_trace else 3.1)
    plots = np.atleast_1d(figure.subplots(1 + has_trace, 1))
    for run in runs:
        shares = accepted_share_per_position(run.total)
        colour, marker = RUN_COLOURS[run.place], RUN_MARKERS[run.place]
        positions = np.arange(1, len(shares) + 1)
        plots[0].plot(positions, shares, marker=marker, color=colour, label=run.label)
        if run.trace is not None:
            plots[1].plot(*accepted_share_by_entropy(run.trace), marker=marker, color=colour)
    labels = ("position in the block", "entropy of the draft, nats")
    for axes, label in zip(plots, labels, strict=False):
        axes.set_xlabel(label)
        axes.set_ylabel("accepted")
        axes.set_ylim(0, 1.06)
        percent_axis(axes)
    whole_numbers(plots[0])
    _legend(figure, runs)
    return figure


def completion_lengths(runs: Sequence[ReportedRun]) -> Figure:
    """How long the completions are."""
    figure, axes = one_plot("tokens of a completion", "share of completions")
    longest = max(int(run.lengths.max()) for run in runs)
    edges = np.linspace(0, longest + 1, min(MAX_LENGTH_BINS, longest + 1) + 1)
    for run in runs:
        counts, _ = np.histogram(run.lengths, edges)
        colour = RUN_COLOURS[run.place]
        axes.stairs(counts / len(run.lengths), edges, color=colour, linewidth=2, label=run.label)
    from_zero(axes)
    axes.set_xlim(left=0)
    percent_axis(axes)
    _legend(figure, runs)
    return figure


def _legend(figure: Figure, runs: Sequence[ReportedRun]) -> None:
    if len(runs) > 1:
        legend_below(figure)


def _time_unit(runs: Sequence[ReportedRun]) -> tuple[int, str]:
    """Seconds and name of the unit of a time axis."""
    longest_s = max(run.span_s or 0.0 for run in runs)
    return next(unit for unit in TIME_UNITS if longest_s >= unit[0] * 3 or unit[0] == 1)
