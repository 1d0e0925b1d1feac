"""The page: all panels of a report in one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version

from markupsafe import Markup

from specdist.reporting.acceptance import by_entropy, by_position, lengths
from specdist.reporting.formats import count
from specdist.reporting.markup import left_out, paragraph, render, table
from specdist.reporting.overview import banners, configuration, side_by_side, summary_tiles
from specdist.reporting.panel import Panel, names
from specdist.reporting.rates import Tuned
from specdist.reporting.runs import ReportedRun
from specdist.reporting.speed import speed_by_shard, speed_over_time
from specdist.reporting.style import png, report_style
from specdist.reporting.timing import predicted_time, theory
from specdist.reporting.waste import rates
from specdist.reporting.work import time_per_role


def make_panels(runs: Sequence[ReportedRun], tuned: Tuned | None) -> list[Panel]:
    """In the order of the page. What needs a draft is told of the runs that have one."""
    with report_style():
        drafting = [run for run in runs if run.has_drafts]
        panels = [side_by_side(runs)] if len(runs) > 1 else []
        panels += [configuration(runs), speed_over_time(runs), speed_by_shard(runs), time_per_role(runs)]
        if drafting:
            panels += [
                by_position(drafting), lengths(drafting), by_entropy(drafting), rates(drafting, tuned),
                predicted_time(drafting), theory(drafting),
            ]  # fmt: skip
        if len(drafting) < len(runs):
            panels.append(_without_draft([run for run in runs if not run.has_drafts], len(runs)))
        panels.append(error_rows(runs))
        return panels


def _without_draft(runs: Sequence[ReportedRun], num_runs: int) -> Panel:
    who = names(runs) if num_runs > 1 else "This run"
    return Panel(
        name="no-draft",
        title="No draft",
        help="Acceptance, lengths, discarded tokens and the papers' formulas are about drafted tokens.",
        content=[
            left_out(f"{who} generated with the target alone, so these panels are left out. Run with --draft "
            "and a --policy other than none to get them.")
        ],
    )  # fmt: skip


def error_rows(runs: Sequence[ReportedRun]) -> Panel:
    """Which rows have no completion, and why."""
    content: list[Markup] = []
    for run in runs:
        errors = run.errors
        label = run.label if len(runs) > 1 else "This run"
        if not errors.rows:
            content.append(paragraph(f"{label}: every row has a completion."))
            continue
        kinds = [[kind, count(number)] for kind, number in errors.kinds.items()]
        content.append(table(["reason (N: a number)", "completions"], kinds, caption=label))
        rows = [[f"{row.row_id}/{row.sample_index}", row.reason, row.prompt or "–"] for row in errors.rows]
        header = ["row/sample", "reason", "prompt begins with"]
        shown = (
            f"{label}: the first {len(rows)}" if sum(errors.kinds.values()) > len(rows) else f"{label}: all"
        )
        content.append(table(header, rows, num_texts=3, caption=shown, class_="free"))
        if errors.num_shards_read < errors.num_shards:
            content.append(
                paragraph(
                    f"Reasons of the first {errors.num_shards_read} of {errors.num_shards} shards with "
                    "errors."
                )
            )
    return Panel(
        name="errors",
        title="Rows with an error",
        help="An unusable row does not end a run: it gets finish_reason “error” and the reason.",
        content=content,
    )


def make_page(runs: Sequence[ReportedRun], panels: Sequence[Panel], pictures: Mapping[str, bytes]) -> str:
    """The whole file. ``pictures`` are PNGs by the panels' names."""
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
    """The PNG of every panel that has a picture, by its name."""
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
    return f"Written by jobs/report.py of specdist {version('specdist')} at {now} from {paths}."
