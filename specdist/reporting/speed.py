"""Tokens per second: over time, and of each shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.reporting.formats import count, duration, number, percent, speed
from specdist.reporting.markup import left_out, noted, table
from specdist.reporting.panel import Panel, names, table_by_run
from specdist.reporting.runs import ReportedRun, tokens_per_pass
from specdist.reporting.style import (
    BLUE,
    GREY,
    RUN_COLOURS,
    RUN_MARKERS,
    from_zero,
    label_bars,
    legend_below,
    new_figure,
    one_plot,
    whole_numbers,
)
from specdist.stats.regression import NS_PER_S
from specdist.stats.shard import Stats

MAX_INTERVALS = 60
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MAX_BARS = 40
MAX_REPLICAS = 40
MAX_SLOWEST, MAX_SLOWEST_OF_SEVERAL = 8, 3


@dataclass(frozen=True)
class SpeedOverTime:
    """``edges_s`` of equal intervals since the first request; in each, tokens/s of all replicas, and tokens
    per second of a replica's work, NaN if none worked."""

    edges_s: np.ndarray
    tokens_per_s: np.ndarray
    tokens_per_work_s: np.ndarray


def over_time(shards: Mapping[int, Stats], replicas: Mapping[int, str], num_intervals: int) -> SpeedOverTime:
    """Each shard's tokens and work, spread over the time from its first request to its last completion.

    A replica begins a shard while rows of the last one still run: its open shards share its speed equally.
    The intervals add up to all tokens.
    """
    spans = {shard: _span_s(stats) for shard, stats in shards.items() if stats.work_span.end_unix_ns}
    first = min(begin for begin, _ in spans.values())
    edges = np.linspace(first, max(end for _, end in spans.values()), num_intervals + 1)
    tokens, work_s = np.zeros(num_intervals + 1), np.zeros(num_intervals + 1)
    of_replicas: dict[str, list[int]] = {}
    for shard in spans:
        of_replicas.setdefault(replicas[shard], []).append(shard)
    for mine in of_replicas.values():
        is_done_SE = _progress(np.array([spans[shard] for shard in mine]), edges)
        tokens += np.array([shards[shard].num_completion_tokens for shard in mine]) @ is_done_SE
        work_s += np.array([shards[shard].wall_ns / NS_PER_S for shard in mine]) @ is_done_SE
    worked = np.diff(work_s)
    per_work_s = np.divide(np.diff(tokens), worked, out=np.full(num_intervals, np.nan), where=worked > 1e-9)
    return SpeedOverTime(edges - first, np.diff(tokens) / np.diff(edges), per_work_s)


def _span_s(stats: Stats) -> tuple[float, float]:
    return stats.work_span.begin_unix_ns / NS_PER_S, stats.work_span.end_unix_ns / NS_PER_S


def _progress(spans_S2: np.ndarray, edges_E: np.ndarray) -> np.ndarray:
    """The part of each of a replica's shards that is done at each time: open shards share its speed."""
    times_T, places_S2 = np.unique(spans_S2, return_inverse=True)
    begins_S, ends_S = places_S2.reshape(-1, 2).T
    size = len(times_T)
    num_open_T = np.cumsum(np.bincount(begins_S, minlength=size) - np.bincount(ends_S, minlength=size))
    pace_T = np.diff(times_T) * (num_open_T[:-1] > 0) / np.maximum(1, num_open_T[:-1])
    done_T = np.concatenate([[0.0], np.cumsum(pace_T)])
    done_E = np.interp(edges_E, times_T, done_T)
    whole_S1 = (done_T[ends_S] - done_T[begins_S])[:, None]
    is_done_SE = (done_E - done_T[begins_S][:, None]) / np.where(whole_S1 > 0, whole_S1, np.inf)
    return np.clip(is_done_SE, 0.0, 1.0)


def speed_over_time(runs: Sequence[ReportedRun]) -> Panel:
    timed = [run for run in runs if run.span_s]
    content: list[Markup] = []
    if timed:
        rows = [
            ("first request to last completion", lambda run: duration(run.span_s)),
            ("tokens/s of all replicas", lambda run: speed(_clock_speed(run))),
            ("tokens/s of a replica", lambda run: speed(run.summary["tokens_per_s"])),
            (f"tokens/s per {_devices(timed)}", lambda run: speed(run.summary["tokens_per_s_per_device"])),
            (f"{_devices(timed)}s of a replica", lambda run: f"{run.num_devices:g}"),
            ("replicas", lambda run: count(run.num_replicas)),
        ]
        content.append(table_by_run("mean speed", timed, rows))
    if len(timed) < len(runs):
        missing = names([run for run in runs if not run.span_s])
        content.append(
            left_out(f"Left out: {missing}. Statistics of older versions have no times of shards.")
        )
    return Panel(
        name="speed-over-time",
        title="Speed over time",
        help="Completion tokens per second of wall-clock time, all replicas together, and per "
        f"{_devices(runs)} that was at work. Each shard's tokens are spread evenly over the time in which it "
        "was worked on; dotted lines are means.",
        figure=_time_figure(timed) if timed else None,
        alt="Tokens per second over time",
        content=content,
    )


def _time_figure(runs: Sequence[ReportedRun]) -> Figure:
    longest_s = max(run.span_s or 0.0 for run in runs)
    unit_s, unit = next(unit for unit in TIME_UNITS if longest_s >= unit[0] * 3 or unit[0] == 1)
    figure = new_figure(4.4)
    above, below = figure.subplots(2, 1, sharex=True)
    for index, run in enumerate(runs):
        colour = RUN_COLOURS[index]
        found = over_time(run.shards, run.replicas, min(MAX_INTERVALS, 8 + 2 * len(run.shards)))
        edges = found.edges_s / unit_s
        above.stairs(found.tokens_per_s, edges, baseline=None, color=colour, linewidth=2, label=run.label)
        above.axhline(_clock_speed(run) or 0.0, color=colour, linestyle=":", linewidth=1.4)
        below.stairs(
            found.tokens_per_work_s / run.num_devices, edges, baseline=None, color=colour, linewidth=2
        )
        mean = run.summary["tokens_per_s_per_device"] or 0.0
        below.axhline(mean, color=colour, linestyle=":", linewidth=1.4)
    above.set_ylabel("tokens/s")
    below.set_ylabel(f"tokens/s per {_devices(runs)}")
    below.set_xlabel(f"{unit} since the first request")
    from_zero(above)
    from_zero(below)
    below.set_xlim(left=0)
    if len(runs) > 1:
        legend_below(figure)
    return figure


def speed_by_shard(runs: Sequence[ReportedRun]) -> Panel:
    figure, axes = one_plot("shard", "tokens/s while working")
    if len(runs) == 1 and len(runs[0].shards) <= MAX_BARS:
        bars = axes.bar(list(runs[0].shards), _shard_speeds(runs[0]), color=BLUE, width=0.75)
        label_bars(axes, bars, speed)
        axes.axhline(float(np.median(_shard_speeds(runs[0]))), color=GREY, linestyle=":", linewidth=1.6)
    else:
        for run, colour, marker in zip(runs, RUN_COLOURS, RUN_MARKERS, strict=False):
            size = 6 if len(run.shards) <= MAX_BARS else 2.5
            axes.plot(
                list(run.shards), _shard_speeds(run), marker, markersize=size, label=run.label, color=colour
            )
            axes.axhline(float(np.median(_shard_speeds(run))), color=colour, linestyle=":", linewidth=1.6)
    from_zero(axes)
    whole_numbers(axes)
    if len(runs) > 1:
        legend_below(figure)
    rows = [
        (label, lambda run, share=share: speed(float(np.quantile(_shard_speeds(run), share))))
        for label, share in (("slowest", 0.0), ("lower quarter", 0.25), ("median", 0.5), ("fastest", 1.0))
    ]
    content = [table_by_run("tokens/s of a shard", runs, rows)]
    content += [_slowest(run, is_alone=len(runs) == 1) for run in runs]
    content += [replicas_table(run, is_alone=len(runs) == 1) for run in runs if run.num_replicas > 1]
    return Panel(
        name="speed-by-shard",
        title="Speed by shard and by replica, and the slowest shards",
        help="Each shard's completion tokens divided by the time that its replica spent on it. The dotted "
        "line is the median; a shard far below it had longer prompts, worse drafts, or a slower machine.",
        figure=figure,
        alt="Tokens per second of every shard",
        content=content,
    )


def _slowest(run: ReportedRun, *, is_alone: bool) -> Markup:
    num_shown = MAX_SLOWEST if is_alone else MAX_SLOWEST_OF_SEVERAL
    ordered = sorted(run.shards.items(), key=lambda item: _tokens_per_s(item[1]))[:num_shown]
    rows = [
        [
            str(shard),
            speed(_tokens_per_s(stats)),
            duration(stats.wall_ns / NS_PER_S),
            noted(count(stats.num_completion_tokens), f"prompts {count(stats.num_prompt_tokens)}"),
            number(tokens_per_pass(stats)),
        ]
        for shard, stats in ordered
    ]
    header = ["shard", "tokens/s", "time", "tokens", "per pass"]
    title = "Slowest shards" if is_alone else f"Slowest shards of {run.label}"
    if run.num_replicas > 1:
        header.append("replica")
        rows = [[*row, run.replicas[shard]] for row, (shard, _) in zip(rows, ordered, strict=True)]
    return table(header, rows, caption=title)


def replicas_table(run: ReportedRun, *, is_alone: bool) -> Markup:
    """What each did; target groups that share drafts are replicas, ``-g0``, ``-g1``, ..."""
    totals: dict[str, Stats] = {}
    for shard, stats in run.shards.items():
        totals.setdefault(run.replicas[shard], Stats()).add(stats)
    num_shards = Counter(run.replicas.values())
    rows = [
        [
            replica or "unknown",
            count(num_shards[replica]),
            count(stats.num_completions),
            count(stats.num_completion_tokens),
            speed(_tokens_per_s(stats)),
            number(tokens_per_pass(stats)),
            percent(stats.verified_acceptance_rate),
        ]
        for replica, stats in sorted(totals.items())[:MAX_REPLICAS]
    ]
    header = ["replica or target group", "shards", "rows", "tokens", "tokens/s", "per pass", "accepted"]
    caption = "Replicas and target groups" if is_alone else f"Replicas and target groups of {run.label}"
    if len(totals) > len(rows):
        caption += f": the first {len(rows)} of {len(totals)}"
    return table(header, rows, caption=caption)


def _shard_speeds(run: ReportedRun) -> list[float]:
    return [_tokens_per_s(stats) for stats in run.shards.values()]


def _tokens_per_s(stats: Stats) -> float:
    return stats.num_completion_tokens * NS_PER_S / stats.wall_ns if stats.wall_ns else 0.0


def _clock_speed(run: ReportedRun) -> float | None:
    return run.total.num_completion_tokens / run.span_s if run.span_s else None


def _devices(runs: Sequence[ReportedRun]) -> str:
    return " or ".join(sorted({run.device_name for run in runs}))
