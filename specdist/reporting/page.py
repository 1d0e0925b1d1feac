"""The page: all panels of a report in one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.resources import files

from specdist.reporting.acceptance import by_entropy, by_position, lengths
from specdist.reporting.formats import count
from specdist.reporting.markup import Html, join, table, tag
from specdist.reporting.overview import banners, configuration, side_by_side, tiles
from specdist.reporting.panel import Panel, left_out, names, paragraph
from specdist.reporting.rates import Tuned
from specdist.reporting.runs import ReportedRun
from specdist.reporting.speed import speed_by_shard, speed_over_time
from specdist.reporting.style import png, report_style
from specdist.reporting.timing import predicted_time, theory
from specdist.reporting.waste import rates
from specdist.reporting.work import time_per_role

WORDS = (
    (
        "draft, target",
        "the small model that proposes tokens, and the large one whose distribution the output has",
    ),
    ("block", "the tokens that the draft proposes for a row at a time; K is how many"),
    ("pass", "one forward computation of a model over new tokens of many rows"),
    (
        "judged",
        "the target has compared a drafted token with its own distribution: all before it were accepted",
    ),
    ("α", "the chance that a verified token is accepted"),
    ("discarded", "drafted, but no part of a completion"),
    (
        "entropy",
        "how undecided the draft was of a token, in nats: 0 is certain, 0.69 a coin, 2.3 a die of ten",
    ),
    ("R²", "the share of the differences in time that the fit explains; 1 is all of it"),
    ("replica", "one launch of the job: the target's ranks and the draft's; several may share a run"),
)


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
            left_out(f"{who} generated with the target alone, so these panels are left out. Run with "
            "--draft and "
                     "a --policy other than none to see them.")
        ],
    )  # fmt: skip


def error_rows(runs: Sequence[ReportedRun]) -> Panel:
    """Which rows have no completion, and why."""
    content: list[Html] = []
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
        help="A row that cannot be used does not end a run: it gets finish_reason “error” and its reason.",
        content=content,
    )


def make_page(runs: Sequence[ReportedRun], panels: Sequence[Panel], pictures: Mapping[str, bytes]) -> str:
    """The whole file. ``pictures`` are PNGs by the panels' names."""
    title = f"specdist report: {names(runs)}"
    css = (files("specdist.reporting") / "page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(css)),
    )
    body = tag(
        "body",
        tag("header", tag("h1", names(runs)), paragraph(_subtitle(runs)), banners(runs)),
        tag("nav", *(tag("a", panel.title, href=f"#{panel.name}") for panel in panels)),
        tag("main", *([tiles(runs[0])] if len(runs) == 1 else []), *(_section(p, pictures) for p in panels)),
        tag("footer", tag("h2", "Words"), _words(), paragraph(_origin(runs))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def draw(panels: Sequence[Panel]) -> dict[str, bytes]:
    """The PNG of every panel that has a picture, by its name."""
    with report_style():
        return {panel.name: png(panel.figure) for panel in panels if panel.figure is not None}


def _section(panel: Panel, pictures: Mapping[str, bytes]) -> Html:
    parts: list[Html] = []
    if panel.name in pictures:
        source = "data:image/png;base64," + base64.b64encode(pictures[panel.name]).decode()
        parts.append(tag("figure", tag("img", src=source, alt=panel.alt)))
    parts.append(tag("div", *panel.content, class_="numbers"))
    return tag(
        "section",
        tag("h2", panel.title),
        tag("p", panel.help, class_="help"),
        tag("div", *parts, class_="panel" if panel.name in pictures else "panel wide"),
        id=panel.name,
    )


def _words() -> Html:
    return tag("dl", join(join([tag("dt", word), tag("dd", meaning)]) for word, meaning in WORDS))


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
