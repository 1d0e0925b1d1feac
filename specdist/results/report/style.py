"""The style of all pictures: readable on a phone, in colours that colour-blind readers can distinguish."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Okabe and Ito's, without the yellow that fades on white.
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
RUN_COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY)
RUN_MARKERS = "osDv^P"
GREY, LIGHT_GREY, TEXT = "#666666", "#d9d9d9", "#1b1f24"
WORK_COLOURS: Mapping[str, str] = {
    "verify": BLUE, "draft": ORANGE, "prefill": PINK, "transfer": RED, "host": GREEN, "idle": LIGHT_GREY
}  # fmt: skip
# White text cannot be read on these.
LIGHT_COLOURS = (ORANGE, PINK, SKY, LIGHT_GREY)

# A phone shows the pictures at three quarters of this size.
WIDTH_INCHES, DOTS_PER_INCH = 5.0, 170
SETTINGS = {
    "font.family": "DejaVu Sans", "font.size": 10.5, "axes.labelsize": 10.5, "axes.edgecolor": GREY,
    "axes.labelcolor": TEXT, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e6e6e6", "xtick.color": TEXT, "ytick.color": TEXT,
    "legend.frameon": False, "legend.fontsize": 9.5, "text.color": TEXT, "lines.linewidth": 1.8,
}  # fmt: skip


@contextmanager
def report_style() -> Iterator[None]:
    """Draw in the style of the report."""
    with mpl.rc_context(SETTINGS):
        yield


def new_figure(height_inches: float = 3.1) -> Figure:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    return figure


def one_plot(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = new_figure()
    return figure, figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at zero and end above the data."""
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])


def whole_numbers(axes: Axes) -> None:
    """Ticks at whole numbers on the x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def percent_axis(axes: Axes) -> None:
    """Percentages on the y axis, of shares of one."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def legend_below(figure: Figure) -> None:
    """A legend outside of the axes, where it covers nothing."""
    figure.legend(loc="outside lower center", ncols=2)


def png(figure: Figure) -> bytes:
    """The same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
