"""A panel of the report: a title, how to read it, a picture, and the most important numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.results.report.markup import Content, table
from specdist.results.report.runs import ReportedRun


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A section of the page.

    Attributes:
        name: of the link and of the PNG file.
        help: what it shows, in a sentence or two.
        figure, alt: a picture, and its description for readers who cannot see it.
        content: tables and paragraphs next to the picture.
    """

    name: str
    title: str
    help: str
    figure: Figure | None = None
    alt: str = ""
    content: Sequence[Markup] = ()


def table_by_run(
    first: str, runs: Sequence[ReportedRun], rows: Sequence[tuple[Content, Callable[[ReportedRun], str]]]
) -> Markup:
    """A table with a column per run, named if there are several."""
    header = [first, *(label_of(run, runs) for run in runs)]
    return table(header, [[label, *(figure(run) for run in runs)] for label, figure in rows])


def label_of(run: ReportedRun, runs: Sequence[ReportedRun], alone: str = "") -> str:
    """A run's label among several; ``alone`` if it is the only one."""
    return run.label if len(runs) > 1 else alone


def names(runs: Sequence[ReportedRun]) -> str:
    return ", ".join(run.label for run in runs)
