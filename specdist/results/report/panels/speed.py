"""Tokens per second: over time, and of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.results.report.formats import count, duration, number, percent, speed
from specdist.results.report.markup import left_out, noted, table
from specdist.results.report.panel import Panel, names, table_by_run
from specdist.results.report.runs import ReportedRun, tokens_per_pass
from specdist.results.report.shard_figures import COUNTS, ShardFigures
from specdist.results.report.style import (
    RUN_COLOURS,
    RUN_MARKERS,
    from_zero,
    legend_below,
    new_figure,
    one_plot,
    whole_numbers,
)

MAX_INTERVALS = 60
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MAX_LARGE_MARKERS = 40
MAX_REPLICAS = 40
MAX_SLOWEST, MAX_SLOWEST_OF_SEVERAL = 8, 3


@dataclass(frozen=True)
class SpeedOverTime:
    """``edges_s`` of equal intervals since the first request; in each, tokens/s of all replicas, and tokens
    per second of a replica's work, NaN if none worked."""

    edges_s: np.ndarray
    tokens_per_s: np.ndarray
    tokens_per_work_s: np.ndarray


def over_time(shards: ShardFigures, num_intervals: int) -> SpeedOverTime:
    """Each shard's tokens and work, spread over the time from its first request to its last completion.

    A replica begins a shard while rows of the last one still run: its open shards share its speed equally.
    The intervals add up to all tokens.
    """
    spans_S2 = np.stack([shards["begin_unix_ns"], shards["end_unix_ns"]], axis=1) / NS_PER_S
    is_timed_S = spans_S2[:, 1] > 0
    first = spans_S2[is_timed_S, 0].min()
    edges = np.linspace(first, spans_S2[is_timed_S, 1].max(), num_intervals + 1)
    amounts_2S = np.stack([shards["num_completion_tokens"], shards["wall_ns"] / NS_PER_S])
    done_2E = np.zeros((2, num_intervals + 1))
    [timed] = is_timed_S.nonzero()
    timed = timed[np.argsort(shards.places[timed], kind="stable")]
    for mine in np.split(timed, np.flatnonzero(np.diff(shards.places[timed])) + 1):
        done_2E += _progress(spans_S2[mine], edges, amounts_2S[:, mine])
    tokens, work_s = done_2E
    worked = np.diff(work_s)
    per_work_s = np.divide(np.diff(tokens), worked, out=np.full(num_intervals, np.nan), where=worked > 1e-9)
    return SpeedOverTime(edges - first, np.diff(tokens) / np.diff(edges), per_work_s)


def _progress(spans_S2: np.ndarray, edges_E: np.ndarray, amounts_2S: np.ndarray) -> np.ndarray:
    """How much of the amounts of a replica's shards is done at each time: open shards share its speed."""
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


def speed_over_time(runs: Sequence[ReportedRun]) -> Panel:
    timed = [run for run in runs if run.span_s]
    content: list[Markup] = []
    if timed:
        rows = [
            ("first request to last completion", lambda run: duration(run.span_s)),
            ("tokens/s of all replicas", lambda run: speed(_clock_speed(run))),
            ("tokens/s of a replica", lambda run: speed(run.summary["tokens_per_s"])),
            (f"tokens/s per {_devices(timed)}", lambda run: speed(run.summary["tokens_per_s_per_device"])),
            (f"{_devices(timed)}s of a replica", lambda run: f"{run.num_devices}"),
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
        found = over_time(run.shards, min(MAX_INTERVALS, 8 + 2 * len(run.shards)))
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
    for run, colour, marker in zip(runs, RUN_COLOURS, RUN_MARKERS, strict=False):
        size = 6 if len(run.shards) <= MAX_LARGE_MARKERS else 2.5
        axes.plot(
            run.shards.shards, _shard_speeds(run), marker, markersize=size, label=run.label, color=colour
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
    speeds_S, shards = _shard_speeds(run), run.shards
    slowest = np.argsort(speeds_S, kind="stable")[:num_shown].tolist()
    rows = [
        [
            str(shards.shards[place]),
            speed(speeds_S[place]),
            duration(shards["wall_ns"][place] / NS_PER_S),
            noted(
                count(shards["num_completion_tokens"][place]),
                f"prompts {count(shards['num_prompt_tokens'][place])}",
            ),
            number(tokens_per_pass(_counts(shards, place))),
        ]
        for place in slowest
    ]
    header = ["shard", "tokens/s", "time", "tokens", "per pass"]
    title = "Slowest shards" if is_alone else f"Slowest shards of {run.label}"
    if run.num_replicas > 1:
        header.append("replica")
        rows = [[*row, shards.replica_of(place)] for row, place in zip(rows, slowest, strict=True)]
    return table(header, rows, caption=title)


def replicas_table(run: ReportedRun, *, is_alone: bool) -> Markup:
    """What each did."""
    places = sorted(range(run.num_replicas), key=lambda place: run.shards.replicas[place])
    rows = []
    for place in places[:MAX_REPLICAS]:
        is_its_S = run.shards.places == place
        counts = _counts(run.shards, is_its_S)
        rows.append(
            [
                run.shards.replicas[place] or "unknown",
                count(is_its_S.sum()),
                count(counts.num_completions),
                count(counts.num_completion_tokens),
                speed(_tokens_per_s(counts)),
                number(tokens_per_pass(counts)),
                percent(counts.verified_acceptance_rate),
            ]
        )
    header = ["replica", "shards", "rows", "tokens", "tokens/s", "per pass", "accepted"]
    caption = "Replicas" if is_alone else f"Replicas of {run.label}"
    if run.num_replicas > len(rows):
        caption += f": the first {len(rows)} of {run.num_replicas}"
    return table(header, rows, caption=caption)


def _counts(shards: ShardFigures, places: Any) -> Stats:
    """The sum of the figures of the shards at these places, as far as they are of statistics."""
    found = Stats()
    for name in COUNTS:
        setattr(found, name, int(shards[name][places].sum()))
    return found


def _shard_speeds(run: ReportedRun) -> np.ndarray:
    """[S] tokens per second of each shard's work; 0 for one without times."""
    tokens_S, wall_S = run.shards["num_completion_tokens"], run.shards["wall_ns"] / NS_PER_S
    return np.divide(tokens_S, wall_S, out=np.zeros(len(tokens_S)), where=wall_S > 0)


def _tokens_per_s(stats: Stats) -> float:
    return stats.num_completion_tokens * NS_PER_S / stats.wall_ns if stats.wall_ns else 0.0


def _clock_speed(run: ReportedRun) -> float | None:
    return run.total.num_completion_tokens / run.span_s if run.span_s else None


def _devices(runs: Sequence[ReportedRun]) -> str:
    return " or ".join(sorted({run.device_name for run in runs}))
