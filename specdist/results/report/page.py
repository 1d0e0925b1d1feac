"""A run's report: six figures and a table on one page that needs no other file, and a PNG of every figure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdist.data.run.manifest import seed_says
from specdist.data.store.files import write_atomically, writing
from specdist.job.totals.spending import NOT_COMPARED, chosen_options, price_per_million
from specdist.results.report.figures import RUN_COLOURS, draw_figures
from specdist.results.report.runs import ReportedRun, labels_of, read_run
from specdist.utils.errors import UserError
from specdist.utils.packages import version_of

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"
PACKAGES = ("specdist", "torch", "transformers", "deepspeed")
NOTHING = "–"


@dataclass(frozen=True)
class WrittenReport:
    """The paths of the page and its pictures."""

    page: Path
    pictures: Sequence[Path]


def write_report(outputs: Sequence[Path], *, folder: Path | None = None) -> WrittenReport:
    """Write ``report.html`` and a PNG of every figure, replacing earlier ones.

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
    labels = labels_of(outputs)
    runs = [
        read_run(path, label, place) for place, (path, label) in enumerate(zip(outputs, labels, strict=True))
    ]
    pictures = draw_figures(runs)
    content = make_page(runs, pictures).encode("utf-8", "replace")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.png": picture for name, picture in pictures.items()} | {PAGE_FILE: content}
        for name, data in files.items():
            write_atomically(folder / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    return WrittenReport(folder / PAGE_FILE, [folder / f"{name}.png" for name in pictures])


def make_page(runs: Sequence[ReportedRun], pictures: Mapping[str, bytes]) -> str:
    """The HTML of the page, of the template in this folder, which escapes all texts. ``pictures``: PNGs by
    the names of their figures."""
    loader = PackageLoader("specdist.results.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="minutes")
    package = " ".join(filter(None, ("specdist", version_of("specdist"))))
    paths = ", ".join(str(run.path.resolve()) for run in runs)
    return environment.get_template("page.html").render(
        title=", ".join(run.label for run in runs),
        runs=runs,
        pictures={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        groups=table_groups(runs),
        seed_says=seed_says,
        origin=f"Written by jobs/report.py of {package} at {now} from {paths}.",
    )


def table_groups(runs: Sequence[ReportedRun]) -> list[tuple[str, list[list[str]]]]:
    """The groups of the table and their lines, each with its name and a value per run; lines that say
    nothing of any run are left out.

    The last group has of a single run the options that are not the defaults, of several those that differ.
    """
    options = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_COMPARED)
    if len(runs) > 1:
        chosen = [name for name in options if len({shown(run.config.get(name)) for run in runs}) > 1]
        title = "Options that differ"
    else:
        chosen = list(chosen_options(runs[0].config))
        title = "Options that are not the defaults"
    groups = [
        ("Figures (show.py --schema says what they mean)", [_figures_of(run) for run in runs]),
        ("Run", [_facts_of(run) for run in runs]),
        (title, [{name: run.config.get(name) for name in chosen} for run in runs]),
    ]
    tables = []
    for group, values in groups:
        names = dict.fromkeys(name for each in values for name in each)
        lines = [[name, *(shown(each.get(name)) for each in values)] for name in names]
        tables.append((group, [line for line in lines if {*line[1:]} != {NOTHING}]))
    return tables


def _figures_of(run: ReportedRun) -> dict[str, Any]:
    """The totals of the finished shards, without the times, which a figure shows."""
    summary = run.total.summary(run.num_devices)
    figures = {name: value for name, value in summary.items() if not isinstance(value, dict)}
    memory = {
        f"peak_memory_bytes.{role}": size or None for role, size in summary["peak_memory_bytes"].items()
    }
    clock_speed = run.total.num_completion_tokens / run.span_s if run.span_s else None
    price = price_per_million(run.config.get("gpu_price"), summary["tokens_per_s_per_device"])
    return {
        **figures,
        **memory,
        "seconds from the first request to the last completion": run.span_s,
        "tokens/s of all replicas": clock_speed,
        "price of a million tokens": price,
    }


def _facts_of(run: ReportedRun) -> dict[str, Any]:
    info = run.manifest.info
    return {
        "shards": f"{run.status.num_done} of {run.status.num_shards}",
        "replicas": len({shard.replica for shard in run.shards}),
        "ranks of a replica": run.num_devices,
        "exactness": "exact" if run.is_exact else "NOT exact",
        **{name: info.get(name) for name in ("reproducibility", "device", "draft_placement")},
        **{name: info.get("versions", {}).get(name) for name in PACKAGES},
    }


def shown(value: Any) -> str:
    """A value as text for people; an unknown one is a dash."""
    if value is None or value == []:
        return NOTHING
    if isinstance(value, (bool, str, list, dict)):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
