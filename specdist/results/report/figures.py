"""The six figures of a report, each of one run or of several beside one another.

Colours are Okabe and Ito's, which colour-blind readers can distinguish. E edges of intervals.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specdist.data.stats.fields import DraftTimes, TargetTimes
from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import FinishedShard
from specdist.results.report.runs import ReportedRun

BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
RUN_COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
RUN_MARKERS = "osDv^P"
WORK_COLOURS: Mapping[str, str] = {
    "verify": BLUE, "draft": ORANGE, "prefill": PINK, "transfer": RED, "host": GREEN, "idle": "#d9d9d9"
}  # fmt: skip
# A phone shows the pictures at three quarters of this size.
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 5.0, 3.1, 170
SETTINGS = {
    "font.family": "DejaVu Sans", "font.size": 10.5, "axes.labelsize": 10.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6",
    "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 1.8,
}  # fmt: skip
TIME_UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
MAX_INTERVALS, MAX_LENGTH_BINS = 60, 40


def draw_figures(runs: Sequence[ReportedRun]) -> dict[str, bytes]:
    """PNGs by name, in the order of the page, without those that no run has anything for. The same runs give
    the same bytes."""
    timed = [run for run in runs if run.span_s]
    drafting = [run for run in runs if run.has_drafts]
    figures: dict[str, tuple[Callable[[Axes, Sequence[ReportedRun]], None], Sequence[ReportedRun]]] = {
        "speed-over-time": (speed_over_time, timed),
        "shards": (shard_times, timed),
        "time-per-role": (time_per_role, timed),
        "block-lengths": (block_lengths, drafting),
        "acceptance": (acceptance, drafting),
        "completion-lengths": (completion_lengths, [run for run in runs if len(run.lengths)]),
    }
    pictures = {}
    for name, (draw, shown) in figures.items():
        if not shown:
            continue
        with mpl.rc_context(SETTINGS):
            figure = Figure((WIDTH_INCHES, HEIGHT_INCHES), layout="constrained", dpi=DOTS_PER_INCH)
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            draw(axes, shown)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                figure.legend(loc="outside lower center", ncols=3)
            file = io.BytesIO()
            figure.savefig(file, format="png", metadata={"Software": None})
        pictures[name] = file.getvalue()
    return pictures


def tokens_per_s_over_time(
    shards: Sequence[FinishedShard], num_intervals: int
) -> tuple[np.ndarray, np.ndarray]:
    """Edges [E] of equal intervals, in seconds since the first request, and in each the tokens per second of
    all replicas. A shard's tokens are spread evenly from its first request to its last completion."""
    timed = [(*shard.span_s, shard.stats.num_completion_tokens) for shard in shards if shard.span_s]
    begins_S1, ends_S1, tokens_S1 = np.array(timed).T[:, :, None]
    edges_E = np.linspace(begins_S1.min(), ends_S1.max(), num_intervals + 1)
    shares_SE = np.clip((edges_E - begins_S1) / np.maximum(ends_S1 - begins_S1, 1e-9), 0, 1)
    done_E = (tokens_S1 * shares_SE).sum(0)
    return edges_E - edges_E[0], np.diff(done_E) / np.diff(edges_E)


def speed_over_time(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """Tokens per second of all replicas."""
    unit_s = _time_axis(axes, runs)
    for run in runs:
        edges_s, rates = tokens_per_s_over_time(run.shards, min(MAX_INTERVALS, 8 + 2 * len(run.shards)))
        axes.stairs(
            rates, edges_s / unit_s, baseline=None, color=RUN_COLOURS[run.place], linewidth=2, label=run.label
        )
    axes.set_ylabel("tokens/s")
    _from_zero(axes)


def shard_times(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """When each shard was worked on, and how fast."""
    unit_s = _time_axis(axes, runs)
    for run in runs:
        timed = [shard for shard in run.shards if shard.span_s is not None]
        spans_S2 = np.array([shard.span_s for shard in timed])
        spans_S2 = (spans_S2 - spans_S2.min()) / unit_s
        speeds = [shard.tokens_per_s for shard in timed]
        colour = RUN_COLOURS[run.place]
        axes.hlines(speeds, spans_S2[:, 0], spans_S2[:, 1], color=colour, linewidth=2, label=run.label)
    axes.set_ylabel("tokens/s of a shard")
    _from_zero(axes)


def time_per_role(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """Shares of the time of the target's rank 0 and of the draft's rank."""
    bars: dict[str, Mapping[str, int]] = {}
    for run in runs:
        roles: dict[str, TargetTimes | DraftTimes] = {
            "target": run.total.target_ns, "draft": run.total.draft_ns
        }  # fmt: skip
        for role, times in roles.items():
            if times.total:
                bars[f"{run.label}, {role}" if len(runs) > 1 else role] = dataclasses.asdict(times)
    before = np.zeros(len(bars))
    for kind, colour in WORK_COLOURS.items():
        shares = np.array([times.get(kind, 0) / sum(times.values()) for times in bars.values()])
        if shares.any():
            axes.barh(range(len(bars)), shares, left=before, height=0.7, color=colour, label=kind)
        before = before + shares
    axes.set_yticks(range(len(bars)), labels=list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the time")


def block_lengths(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """How many tokens the blocks had, and how many of them were accepted."""
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
    axes.set(xlabel="tokens of a block", ylabel="share of blocks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    _from_zero(axes, is_share=True)


def accepted_share_per_position(stats: Stats) -> np.ndarray:
    """The share of the tokens drafted at each position of a block that were accepted."""
    lengths = np.array(stats.draft_length_histogram, np.int64)
    drafted = np.cumsum(lengths[::-1])[::-1][1:]
    accepted = np.zeros(len(drafted))
    accepted[: len(stats.num_accepted_tokens_per_pos)] = stats.num_accepted_tokens_per_pos
    return accepted / drafted


def acceptance(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """Shares of accepted tokens by their position in the block."""
    for run in runs:
        shares = accepted_share_per_position(run.total)
        axes.plot(
            np.arange(1, len(shares) + 1), shares, marker=RUN_MARKERS[run.place],
            color=RUN_COLOURS[run.place], label=run.label,
        )  # fmt: skip
    axes.set(xlabel="position in the block", ylabel="accepted")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    _from_zero(axes, is_share=True)


def completion_lengths(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """How long the completions are."""
    longest = max(int(run.lengths.max()) for run in runs)
    edges_E = np.linspace(0, longest + 1, min(MAX_LENGTH_BINS, longest + 1) + 1)
    for run in runs:
        shares = np.histogram(run.lengths, edges_E)[0] / len(run.lengths)
        axes.stairs(shares, edges_E, color=RUN_COLOURS[run.place], linewidth=2, label=run.label)
    axes.set(xlabel="tokens of a completion", ylabel="share of completions")
    _from_zero(axes, is_share=True)


def _time_axis(axes: Axes, runs: Sequence[ReportedRun]) -> int:
    """Label the axis; seconds of its unit."""
    longest_s = max(run.span_s or 0.0 for run in runs)
    unit_s, unit = next(unit for unit in TIME_UNITS if longest_s >= unit[0] * 3 or unit[0] == 1)
    axes.set_xlabel(f"{unit} since the first request")
    return unit_s


def _from_zero(axes: Axes, *, is_share: bool = False) -> None:
    """Let the y axis begin at zero and end above the data."""
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    if is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
