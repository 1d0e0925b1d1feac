"""A panel of the report: a title, how to read it, a picture, and the numbers that matter beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from specdist.reporting.markup import Content, table
from specdist.reporting.runs import ReportedRun


@dataclass(frozen=True, kw_only=True)
class Panel:
    """
    Attributes:
        name: of its link and of its PNG file.
        help: what it shows, in a sentence or two.
        figure, alt: a picture, and what it shows for who cannot see it.
        content: tables and paragraphs beside the picture.
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
    """A column per run; alone, a run needs no name."""
    header = [first, *([run.label for run in runs] if len(runs) > 1 else [""])]
    return table(header, [[label, *(figure(run) for run in runs)] for label, figure in rows])


def names(runs: Sequence[ReportedRun]) -> str:
    return ", ".join(run.label for run in runs)
