"""A run's report: six figures and a table on one page that needs no other file, and a PNG of every figure."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from specdist.config.generate import GenerateConfig
from specdist.data.run.manifest import seed_says
from specdist.data.stats.regression import NS_PER_S
from specdist.data.store.files import write_atomically
from specdist.job.totals.spending import price_per_million
from specdist.results.report.figures import make_figures
from specdist.results.report.formats import NOTHING, count, duration, number, percent, size, speed
from specdist.results.report.runs import ReportedRun, read_runs
from specdist.results.report.style import RUN_COLOURS, png, report_style
from specdist.utils.errors import UserError
from specdist.utils.packages import version_of

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"
DEFAULTS = {item.name: item.default for item in dataclasses.fields(GenerateConfig)}
NOT_COMPARED = ("output", "overwrite")
PACKAGES = ("specdist", "torch", "transformers", "deepspeed")

Value = Callable[[ReportedRun], str]


def _version(package: str, run: ReportedRun) -> str:
    return str(run.info.get("versions", {}).get(package, NOTHING))


# Groups of the table: what each line says of a run.
LINES: Mapping[str, Mapping[str, Value]] = {
    "Speed": {
        "tokens/s of a replica": lambda run: speed(run.summary["tokens_per_s"]),
        "tokens/s per rank or GPU": lambda run: speed(run.summary["tokens_per_s_per_device"]),
        "tokens/s of all replicas": lambda run: speed(run.clock_tokens_per_s),
        "price of a million tokens": lambda run: _price(run),
        "first request to last completion": lambda run: duration(run.span_s),
        "work of all replicas": lambda run: duration(run.summary["wall_s"]),
        "first token after a replica's start": lambda run: duration(run.summary["time_to_first_token_s"]),
        "replicas": lambda run: count(len(run.replicas)),
        "ranks of a replica": lambda run: run.ranks,
        "sequences per target pass": lambda run: _each(run.total.num_row_steps, run.total.num_target_passes),
        "peak memory of a target rank": lambda run: size(run.total.peak_memory_bytes.target),
        "peak memory of a draft rank": lambda run: size(run.total.peak_memory_bytes.draft),
    },
    "Drafting": {
        "tokens per target pass and sequence": lambda run: _each(
            run.total.num_row_steps + run.total.num_accepted_tokens, run.total.num_row_steps
        ),
        "draft tokens": lambda run: count(run.total.num_draft_tokens),
        "draft tokens accepted": lambda run: percent(run.summary["draft_acceptance_rate"]),
        "draft tokens of a block": lambda run: _each(run.total.num_block_candidates, run.total.num_drafts),
        "accepted tokens of a block": lambda run: _each(run.total.num_accepted_tokens, run.total.num_drafts),
        "draft tokens discarded per token": lambda run: number(run.total.discard_rate),
        "time of a target pass": lambda run: _time(run.total.target_ns.verify, run.total.num_target_passes),
        "time of a draft step": lambda run: _time(run.total.draft_ns.draft, run.total.num_draft_passes),
    },
    "Rows": {
        "shards": lambda run: f"{count(len(run.shards))} of {count(run.num_shards)}",
        "rows": lambda run: count(run.total.num_rows),
        "error rows": lambda run: count(run.total.num_error_rows),
        "completions": lambda run: count(run.total.num_completions),
        "completions cut by a length limit": lambda run: count(run.total.num_cut_completions),
        "completion tokens": lambda run: count(run.total.num_completion_tokens),
        "prompt tokens": lambda run: count(run.total.num_prompt_tokens),
    },
    "Run": {
        "exactness": lambda run: "exact" if run.is_exact else "NOT exact",
        "reproducibility": lambda run: str(run.info.get("reproducibility", NOTHING)),
        "device": lambda run: str(run.info.get("device", NOTHING)),
        **{name: partial(_version, name) for name in PACKAGES},
    },
}  # fmt: skip


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
    runs = read_runs(outputs)
    pictures = draw(make_figures(runs))
    content = make_page(runs, pictures).encode("utf-8", "replace")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.png": picture for name, picture in pictures.items()} | {PAGE_FILE: content}
        for name, data in files.items():
            write_atomically(folder / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder}: {error}") from error
    return WrittenReport(folder / PAGE_FILE, [folder / f"{name}.png" for name in pictures])


def draw(figures: Mapping[str, Figure | None]) -> dict[str, bytes]:
    """PNGs of the figures, by name."""
    with report_style():
        return {name: png(figure) for name, figure in figures.items() if figure is not None}


def make_page(runs: Sequence[ReportedRun], pictures: Mapping[str, bytes]) -> str:
    """The HTML of the page, of the template in this folder, which escapes all texts. ``pictures``: PNGs by
    the names of their figures."""
    loader = PackageLoader("specdist.results.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=", ".join(run.label for run in runs),
        runs=runs,
        pictures={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        groups=table_groups(runs),
        seed_says=seed_says,
        origin=_origin(runs),
    )


def table_groups(runs: Sequence[ReportedRun]) -> list[tuple[str, list[list[str]]]]:
    """The groups of the table and their lines, each with its name and a value per run; lines that say
    nothing of any run are left out.

    The last group has of a single run the options that are not the defaults, of several those that differ.
    """
    groups = [
        (group, [[name, *map(value, runs)] for name, value in lines.items()])
        for group, lines in LINES.items()
    ]
    options = dict.fromkeys(name for run in runs for name in run.config if name not in NOT_COMPARED)
    if len(runs) > 1:
        shown = [name for name in options if len({_shown(run.config, name) for run in runs}) > 1]
        title = "Options that differ"
    else:
        shown = [name for name in options if runs[0].config[name] not in (DEFAULTS.get(name), [])]
        title = "Options that are not the defaults"
    groups.append((title, [[name, *(_shown(run.config, name) for run in runs)] for name in shown]))
    return [(group, [line for line in lines if {*line[1:]} != {NOTHING}]) for group, lines in groups]


def _price(run: ReportedRun) -> str:
    price = price_per_million(run.config.get("gpu_price"), run.summary["tokens_per_s_per_device"])
    return NOTHING if price is None else f"{price:.3g}"


def _each(amount: float, among: float) -> str:
    return number(amount / among if among else None)


def _time(total_ns: int, num_passes: int) -> str:
    return duration(total_ns / NS_PER_S / num_passes if num_passes and total_ns else None)


def _shown(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if value is None or value == []:
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _origin(runs: Sequence[ReportedRun]) -> str:
    paths = ", ".join(str(run.folder.path.resolve()) for run in runs)
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="minutes")
    package = " ".join(filter(None, ("specdist", version_of("specdist"))))
    return f"Written by jobs/report.py of {package} at {now} from {paths}."
