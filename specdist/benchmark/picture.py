"""A picture of what each rank does when: one lane per rank, one colour per kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specdist.engine.timeline import Kind, Span

NUM_ROUNDS = 4
COLOURS: Mapping[Kind, str] = {
    "verify": "#2f6db5",
    "draft": "#e08a1e",
    "prefill": "#8a6fb8",
    "transfer": "#c0392b",
    "host": "#5c9e6c",
    "idle": "#ececec",
}
MS = 1e6
# The smallest share of the width in which a span's label can be read.
LABELLED_SHARE = 0.045
LANE_HEIGHT = 0.72


def draw_timeline(path: Path, title: str, lanes: Mapping[str, Sequence[Span]]) -> None:
    """Write a PNG of a few rounds from the middle of the run. Labels give milliseconds of whole spans, also
    of those that the edge cuts; a pass over prompts and candidates is shown split, as its time is booked.

    Args:
        lanes: the first is the target's, which says where a round begins.
    """
    [(_, target), *_] = lanes.items()
    begin_ns, end_ns = middle_rounds(target, NUM_ROUNDS)
    width_ms = (end_ns - begin_ns) / MS
    figure = Figure(figsize=(13, 1.5 + 0.95 * len(lanes)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, spans in enumerate(lanes.values()):
        for span in spans:
            left_ms = (max(span.begin_ns, begin_ns) - begin_ns) / MS
            right_ms = (min(span.end_ns, end_ns) - begin_ns) / MS
            if right_ms <= left_ms:
                continue
            axes.barh(
                lane,
                right_ms - left_ms,
                left=left_ms,
                height=LANE_HEIGHT,
                color=COLOURS[span.kind],
                linewidth=0,
            )
            if right_ms - left_ms >= LABELLED_SHARE * width_ms:
                axes.text(
                    (left_ms + right_ms) / 2,
                    lane,
                    f"{span.kind}\n{(span.end_ns - span.begin_ns) / MS:.1f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="#444444" if span.kind == "idle" else "white",
                    clip_on=True,
                )
    axes.set_xlim(0, width_ms)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), labels=list(lanes), fontsize=11)
    axes.set_xlabel("milliseconds", fontsize=10)
    axes.set_title(title, fontsize=11, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=10,
    )
    figure.savefig(path)


def middle_rounds(target: Sequence[Span], num_rounds: int) -> tuple[int, int]:
    """Nanoseconds of the machine's clock between which so many target passes begin, half-way through the run;
    all of a run that has fewer."""
    begins = [span.begin_ns for span in target if span.kind == "verify"]
    if len(begins) <= num_rounds:
        return target[0].begin_ns, target[-1].end_ns
    first = (len(begins) - num_rounds) // 2
    return begins[first], begins[first + num_rounds]
