"""A picture of two rounds: a row of lanes for every mode, with what each device and each host does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from specdist.results.report.style import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, new_figure, png, report_style
from tests.lab.emulation.session import Run
from tests.lab.emulation.sides import SideLog

NUM_ROUNDS = 2
LANE_INCHES, FRAME_INCHES = 0.22, 0.75
NS_PER_MS = 1e6


def picture(runs: Sequence[tuple[str, Run]]) -> bytes:
    """A PNG file: for each run, by its title, two rounds from its middle.

    A host's lane is coloured while it does not wait, for its device or for the other side.
    """
    lanes = [_lanes(run) for _, run in runs]
    heights = [len(found) * LANE_INCHES + FRAME_INCHES for found in lanes]
    with report_style():
        figure = new_figure(sum(heights) + 0.4)
        axes = np.atleast_1d(figure.subplots(len(runs), 1, height_ratios=heights))
        for axis, (title, run), found in zip(axes, runs, lanes, strict=True):
            _draw(axis, run, found)
            axis.set_title(title, fontsize=10.5, loc="left")
        axes[-1].set_xlabel("milliseconds")
        shown = (("target's GPUs", BLUE), ("draft's GPU", ORANGE), ("host", GREEN), ("waiting", LIGHT_GREY))
        handles = [Patch(color=colour, label=label) for label, colour in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return png(figure)


def _lanes(run: Run) -> list[tuple[str, np.ndarray, str]]:
    """Name, intervals and colour, from the top down."""
    found = [("target", run.target.passes_P2, BLUE), ("its host", _at_work(run.target), GREEN)]
    if run.draft is not None:
        found += [("draft", run.draft.passes_P2, ORANGE), ("its host", _at_work(run.draft), GREEN)]
    return found


def _at_work(side: SideLog) -> np.ndarray:
    """The time between its waits."""
    waits_W2 = side.waits_W2[np.argsort(side.waits_W2[:, 0], kind="stable")]
    return np.stack([waits_W2[:-1, 1], waits_W2[1:, 0]], axis=1)


def _draw(axes: Axes, run: Run, lanes: list[tuple[str, np.ndarray, str]]) -> None:
    middle = max(0, (len(run.edges_R1) - 1) // 2 - NUM_ROUNDS // 2)
    edges = run.edges_R1[middle : middle + NUM_ROUNDS + 1]
    for number, (_, intervals, colour) in enumerate(lanes):
        cut = np.clip(intervals, edges[0], edges[-1])
        cut = cut[cut[:, 1] > cut[:, 0]]
        bars = np.stack([cut[:, 0] - edges[0], cut[:, 1] - cut[:, 0]], axis=1) / NS_PER_MS
        span = (edges[-1] - edges[0]) / NS_PER_MS
        axes.broken_barh([(0, span)], (number - 0.4, 0.8), color=LIGHT_GREY, linewidth=0)
        axes.broken_barh(bars.tolist(), (number - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
    for edge in edges:
        axes.axvline((edge - edges[0]) / NS_PER_MS, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(lanes)), [name for name, *_ in lanes])
    axes.invert_yaxis()
    axes.grid(visible=False)
