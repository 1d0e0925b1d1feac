"""The output of an evaluation: results.json, Arrow files of rows, and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.run.publishing import write_table
from specdist.data.store.files import write_atomically, write_json
from specdist.utils.errors import UserError
from specdist.utils.table import Table

RESULTS_FILE, ROWS_FILE, DIFFERENCES_FILE = "results.json", "rows.arrow", "differences.arrow"


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Raises :class:`UserError` if the folder has results that are not to be replaced."""
    if (folder / RESULTS_FILE).exists() and not overwrite:
        raise UserError(
            f"--output {folder} holds {RESULTS_FILE} already: give another folder, or --overwrite to replace "
            "it"
        )


def write_results(
    folder: Path, document: Mapping[str, Any], tables: Mapping[str, Mapping[str, Sequence[Any]]]
) -> None:
    """Write ``tables``, columns by file name, and last results.json: if it exists, all files are complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS_FILE, ROWS_FILE, DIFFERENCES_FILE):
            (folder / name).unlink(missing_ok=True)
        for name, columns in tables.items():
            write_arrow(folder / name, pa.table(dict(columns)))
        write_json(folder / RESULTS_FILE, document)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written: {error}") from error


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write an Arrow IPC file atomically."""
    write_atomically(path, lambda file: write_table(file, table))


def metrics_table(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, f"{found['value']:.4f}", _range(found["interval"]), f"{found['num_prompts']:,}"]
        for name, found in metrics.items()
    ]
    return Table(["metric", "value", "95% interval", "prompts"], rows).console()


def paired_table(comparisons: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            name, f"{found['first']:.4f}", f"{found['second']:.4f}", f"{found['difference']:+.4f}",
            _range(found["interval"]), f"{found['num_better']:,} / {found['num_worse']:,}",
        ]
        for name, found in comparisons.items()
    ]  # fmt: skip
    header = ["metric", "run", "against", "difference", "95% interval", "better / worse"]
    return Table(header, rows).console()


def identity_text(found: Mapping[str, Any]) -> str:
    """The comparison of two runs' tokens in lines."""
    lines = [
        f"{found['num_identical']:,} of {found['num_rows']:,} rows have the same tokens "
        f"({found['share_identical']:.2%})"
    ]
    if found["settings_that_differ"]:
        lines.append(f"the runs differ in {', '.join(found['settings_that_differ'])}")
    only = found["num_rows_only_in_first"] + found["num_rows_only_in_second"]
    if only:
        lines.append(f"{only:,} rows are in only one of the runs and are not compared")
    if found["kinds_of_difference"]:
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(found["kinds_of_difference"].items()))
        lines.append(f"differing rows by kind: {kinds}")
        lines.append(f"first difference: at token {found['median_first_difference']:,.0f} (median, from 0)")
    return "\n".join(lines)


def _range(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.4f} .. {interval[1]:.4f}"
