"""A run's report: all panels on one page that needs no other file, and a PNG of every picture."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from markupsafe import Markup

from specdist.data.store.files import write_atomically
from specdist.results.report.formats import count
from specdist.results.report.markup import left_out, paragraph, render, table
from specdist.results.report.overview import banners, configuration, side_by_side, summary_tiles
from specdist.results.report.panel import Panel, names
from specdist.results.report.panels.acceptance import by_entropy, by_position, lengths
from specdist.results.report.panels.speed import speed_by_shard, speed_over_time
from specdist.results.report.panels.timing import time_per_role
from specdist.results.report.runs import ReportedRun, read_runs
from specdist.results.report.style import RUN_COLOURS, png, report_style
from specdist.utils.errors import UserError
from specdist.utils.packages import version_of

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """The paths of the page and its pictures."""

    page: Path
    pictures: Sequence[Path]

    @property
    def num_bytes(self) -> int:
        """Size of the page, which includes its pictures."""
        return self.page.stat().st_size


def write_report(outputs: Sequence[Path], *, folder: Path | None = None) -> WrittenReport:
    """Write ``report.html`` and a PNG of every picture, replacing earlier ones.

    Args:
        outputs: folders of runs; several are shown side by side.
        folder: output folder; for a single run by default ``report`` in its own folder.

    Raises:
        UserError: for folders that cannot be read, or too many of them.
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
    runs = read_runs(outputs)
    panels = make_panels(runs)
    pictures = draw(panels)
    content = make_page(runs, panels, pictures).encode("utf-8", "replace")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.png": picture for name, picture in pictures.items()} | {PAGE_FILE: content}
        for name, data in files.items():
            write_atomically(folder / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder}: {error}") from error
    return WrittenReport(folder / PAGE_FILE, [folder / f"{name}.png" for name in pictures])


def make_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """All panels in order; those about drafting show only the runs that have a draft."""
    with report_style():
        drafting = [run for run in runs if run.has_drafts]
        panels = [side_by_side(runs)] if len(runs) > 1 else []
        panels += [configuration(runs), speed_over_time(runs), speed_by_shard(runs), time_per_role(runs)]
        if drafting:
            panels += [by_position(drafting), lengths(drafting), by_entropy(drafting)]
        if len(drafting) < len(runs):
            panels.append(_without_draft([run for run in runs if not run.has_drafts], len(runs)))
        panels.append(error_rows(runs))
        return panels


def _without_draft(runs: Sequence[ReportedRun], num_runs: int) -> Panel:
    who = names(runs) if num_runs > 1 else "This run"
    return Panel(
        name="no-draft",
        title="No draft",
        help="Acceptance and lengths are about drafted tokens.",
        content=[
            left_out(f"{who} generated with the target alone, so these panels are left out. Run with --draft "
            "and a --policy other than none to get them.")
        ],
    )  # fmt: skip


def error_rows(runs: Sequence[ReportedRun]) -> Panel:
    """The rows without a completion, and the reasons."""
    content: list[Markup] = []
    for run in runs:
        errors = run.errors
        label = run.label if len(runs) > 1 else "This run"
        if not errors.rows:
            content.append(paragraph(f"{label}: every row has a completion."))
            continue
        kinds = [[kind, count(number)] for kind, number in errors.kinds.items()]
        content.append(table(["reason (N: a number)", "completions"], kinds, caption=label))
        header = ["row/sample", "reason", "prompt begins with"]
        is_all = sum(errors.kinds.values()) == len(errors.rows)
        caption = f"{label}: all" if is_all else f"{label}: the first {len(errors.rows)}"
        content.append(table(header, errors.rows, num_texts=3, caption=caption, class_="free"))
        if errors.num_shards_read < errors.num_shards:
            read = f"the first {errors.num_shards_read} of {errors.num_shards} shards with errors"
            content.append(paragraph(f"Reasons of {read}."))
    return Panel(
        name="errors",
        title="Rows with an error",
        help="An unusable row does not end a run: it gets finish_reason “error” and the reason.",
        content=content,
    )


def make_page(runs: Sequence[ReportedRun], panels: Sequence[Panel], pictures: Mapping[str, bytes]) -> str:
    """The HTML of the page. ``pictures``: PNGs by the names of their panels."""
    return render(
        "page.html",
        title=names(runs),
        subtitle=_subtitle(runs),
        banners=banners(runs),
        panels=panels,
        pictures={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        tiles=summary_tiles(runs[0]) if len(runs) == 1 else "",
        origin=_origin(runs),
    )


def draw(panels: Sequence[Panel]) -> dict[str, bytes]:
    """PNGs of the panels that have a picture, by name."""
    with report_style():
        return {panel.name: png(panel.figure) for panel in panels if panel.figure is not None}


def _subtitle(runs: Sequence[ReportedRun]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs of specdist side by side"
    [run] = runs
    draft = run.info.get("draft")
    models = f"{run.info.get('target')}" + (f" with draft {draft}" if draft and run.has_drafts else "")
    done = "complete" if run.status is None else "not finished"
    return f"A run of specdist: {models}. {'Exact' if run.is_exact else 'NOT exact'}, {done}."


def _origin(runs: Sequence[ReportedRun]) -> str:
    paths = ", ".join(str(run.folder.path.resolve()) for run in runs)
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="minutes")
    package = " ".join(filter(None, ("specdist", version_of("specdist"))))
    return f"Written by jobs/report.py of {package} at {now} from {paths}."
