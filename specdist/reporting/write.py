"""The report's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdist.data.files import write_atomically
from specdist.reporting.page import draw, make_page, make_panels
from specdist.reporting.rates import read_tuned
from specdist.reporting.runs import read_runs
from specdist.reporting.style import RUN_COLOURS
from specdist.utils.errors import UserError

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """Where the page and its pictures are."""

    page: Path
    pictures: Sequence[Path]

    @property
    def num_bytes(self) -> int:
        """Of the page, which holds its pictures itself."""
        return self.page.stat().st_size


def write_report(
    outputs: Sequence[Path], *, folder: Path | None = None, tune: Path | None = None
) -> WrittenReport:
    """Write ``report.html`` and a PNG of every picture; whatever had these names is replaced.

    Args:
        outputs: folders of runs; several are shown side by side.
        folder: where to; of a single run by default ``report`` in its own folder.
        tune: what ``jobs/tune.py`` has left for this pair, for the policies that it replayed.

    Raises:
        UserError: for a folder that cannot be read, or too many of them.
    """
    if len(outputs) > len(RUN_COLOURS):
        raise UserError(
            f"{len(outputs)} runs are more than the {len(RUN_COLOURS)} that a report can tell apart: give "
            "fewer"
        )
    if len({output.resolve() for output in outputs}) < len(outputs):
        raise UserError("a run is given twice: name every folder once")
    if folder is None:
        if len(outputs) > 1:
            raise UserError("a report of several runs needs a folder: give one with --folder")
        folder = outputs[0] / REPORT_FOLDER
    tuned = None if tune is None else read_tuned(tune)
    runs = read_runs(outputs)
    panels = make_panels(runs, tuned)
    pictures = draw(panels)
    content = make_page(runs, panels, pictures).encode("utf-8", "replace")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            _write(folder / f"{name}.png", picture)
        _write(folder / PAGE_FILE, content)
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder}: {error}") from error
    return WrittenReport(folder / PAGE_FILE, [folder / f"{name}.png" for name in pictures])


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))
