"""Reading completions from a run's folder or its merged file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.columns import OUTPUT_COLUMNS
from specdist.data.formats.inputs import describe_columns
from specdist.data.formats.json_columns import rows_of
from specdist.data.run.manifest import Manifest
from specdist.data.stats.rows import EXACT_METADATA
from specdist.results.runs import load_run
from specdist.utils.errors import UserError


@dataclass(frozen=True)
class Completions:
    """The rows of a run, in input order.

    ``manifest`` is None for a merged file. ``num_missing_shards``: shards that the run has not finished.
    """

    path: Path
    table: pa.Table
    manifest: Manifest | None
    num_missing_shards: int = 0

    @property
    def is_exact(self) -> bool | None:
        """Whether the run was exact, by the file's metadata; None if they do not tell."""
        found = (self.table.schema.metadata or {}).get(EXACT_METADATA)
        return None if found is None else found == b"true"

    def check_columns(self, names: dict[str, str]) -> None:
        """``names``: what needs each column. Raises :class:`UserError` for a missing one."""
        for name, purpose in names.items():
            if name not in self.table.column_names:
                own = [field for field in self.table.schema if field.name not in OUTPUT_COLUMNS]
                raise UserError(
                    f"{purpose} needs the column {name}, which {self.path} does not have; besides "
                    f"the output's own it has {describe_columns(pa.schema(own))}"
                )

    def rows(self, *names: str) -> list[dict[str, Any]]:
        """The rows as dictionaries of these columns, or of all."""
        table = self.table.select(list(names)) if names else self.table
        return list(rows_of(table))


def read_completions(path: Path) -> Completions:
    """The rows of a run, verified by its checksums, or of a file written by jobs/merge.py.

    Raises :class:`UserError` for anything else.
    """
    if path.is_dir():
        run = load_run(path, verify=True)
        return Completions(path, run.table, run.manifest, len(run.missing_shards))
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; name the folder of a run, or its merged file")
    if path.suffix not in (".arrow", ".parquet"):
        raise UserError(
            f"{path} cannot be evaluated: name the run's folder, or merge it into a file that ends in .arrow "
            "or .parquet, which keep the columns' types"
        )
    try:
        if path.suffix == ".parquet":
            table = pa.parquet.read_table(path)
        else:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read (damaged or truncated?): {error}") from error
    missing = [name for name in OUTPUT_COLUMNS if name not in table.column_names]
    if missing:
        raise UserError(
            f"{path} lacks columns of a run's output ({', '.join(missing)}): name the run's folder, or what "
            "jobs/merge.py has made of it without --format"
        )
    return Completions(path, table, None)
