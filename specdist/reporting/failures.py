"""Rows that have no completion, and why: read from the shards whose statistics count some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from specdist.data import RunFolder
from specdist.data.reading import read_columns
from specdist.job.status import error_kind

COLUMNS = ("row_id", "sample_index", "prompt", "error")
MAX_SHARDS_READ = 50
MAX_ROWS_SHOWN = 20
MAX_PROMPT_CHARACTERS = 80


@dataclass(frozen=True)
class ErrorRow:
    """``prompt`` is its beginning; empty where the row has none."""

    row_id: int
    sample_index: int
    reason: str
    prompt: str


@dataclass(frozen=True)
class ErrorRows:
    """The first rows, and how many completions failed for which reason in the shards that were read."""

    rows: Sequence[ErrorRow]
    kinds: Mapping[str, int]
    num_shards: int
    num_shards_read: int


def read_error_rows(folder: RunFolder, shards: Sequence[int]) -> ErrorRows:
    """Of the first shards among these, which have some."""
    rows: list[ErrorRow] = []
    kinds = Counter[str]()
    read = shards[:MAX_SHARDS_READ]
    for shard in read:
        table = _failed(folder.data_path(shard))
        kinds.update(error_kind(reason) for reason in table["error"].to_pylist())
        for row in table.slice(0, MAX_ROWS_SHOWN - len(rows)).to_pylist():
            prompt = " ".join(str(row["prompt"] or "")[: 2 * MAX_PROMPT_CHARACTERS].split())
            is_cut = len(prompt) > MAX_PROMPT_CHARACTERS
            shown = prompt[:MAX_PROMPT_CHARACTERS] + "…" if is_cut else prompt
            rows.append(ErrorRow(row["row_id"], row["sample_index"], row["error"], shown))
    return ErrorRows(rows, dict(kinds.most_common()), len(shards), len(read))


def _failed(path: Path) -> pa.Table:
    table = read_columns(path, COLUMNS)
    return table.filter(pa.compute.is_valid(table["error"]))
