"""The first place at which two runs' files differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

TOKENS = ("row_id", "sample_index", "completion_ids", "completion", "finish_reason")


def first_difference(there: Path, here: Path, *, of_tokens_alone: bool = False) -> str | None:
    """Of two run folders: None where every file of rows has the same bytes, or its rows the same tokens."""
    files = {
        folder: {path.name: path for path in (folder / "shards").rglob("*.arrow")} for folder in (there, here)
    }
    if not files[here] or files[there].keys() != files[here].keys():
        return f"files {sorted(files[here])}, there {sorted(files[there])}"
    for name, path in sorted(files[here].items()):
        if path.read_bytes() == files[there][name].read_bytes():
            continue
        tables = _read(files[there][name]), _read(path)
        if of_tokens_alone:
            tables = tables[0].select(TOKENS), tables[1].select(TOKENS)
        if found := _of_tables(*tables):
            return found
        if not of_tokens_alone:
            return f"{name}: other bytes of the same rows"
    return None


def _read(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()


def _of_tables(there: pa.Table, here: pa.Table) -> str | None:
    if here.column_names != there.column_names or here.num_rows != there.num_rows:
        return f"{here.num_rows} rows of {here.column_names}, there {there.num_rows} of {there.column_names}"
    # Tokens first: texts and numbers follow from them.
    for name in sorted(here.column_names, key=lambda name: (name != "completion_ids", name)):
        for row, (one, other) in enumerate(zip(there[name].to_pylist(), here[name].to_pylist(), strict=True)):
            # Not a number is not itself.
            if repr(one) != repr(other):
                return f"row {_key(here, row)}, {name}{_of_values(one, other)}"
    return None


def _key(table: pa.Table, row: int) -> str:
    names = [name for name in ("row_id", "sample_index") if name in table.column_names]
    return "/".join(str(table[name][row].as_py()) for name in names)


def _of_values(there: Any, here: Any) -> str:
    if isinstance(there, list) and isinstance(here, list):
        both = enumerate(zip(there, here, strict=False))
        place = next((i for i, (one, other) in both if repr(one) != repr(other)), min(len(there), len(here)))
        return f"[{place}]: {here[place : place + 3]}, there {there[place : place + 3]}"
    return f": {here!r:.80}, there {there!r:.80}"
