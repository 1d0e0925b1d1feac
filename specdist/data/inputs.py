"""The files that ``--prompts`` names, and their rows as one Arrow table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.jsonl import PromptColumn, read_jsonl
from specdist.data.text import check_layout
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

ARROW_FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
KINDS = {
    "Arrow": (".arrow",),
    "Parquet": (".parquet",),
    "JSONL": (".jsonl", ".jsonl.gz", ".json", ".json.gz"),
}
SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)


def find_files(path: Path) -> list[Path]:
    """The data files at ``path``, in row order. Raises :class:`UserError` if there are none."""
    if path.is_file():
        _kind(path)
        return [path]
    if not path.is_dir():
        raise UserError(f"--prompts {path}: no such file or folder")
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise UserError(f"--prompts {path} is a DatasetDict: give the folder of one of its splits ({splits})")
    if (path / "state.json").is_file():
        return _saved_dataset_files(path)
    return _folder_files(path)


@dataclass(frozen=True)
class InputRows:
    """All rows; ``ends`` and ``unusable`` as in :class:`specdist.data.Prompts`."""

    rows: pa.Table
    ends: tuple[int, ...] | None = None
    unusable: Mapping[int, str] = field(default_factory=dict)


def read_table(files: list[Path], prompts: PromptColumn) -> InputRows:
    """All rows of files of one type, Arrow ones memory-mapped. Raises :class:`UserError` with the file."""
    kind = _kind(files[0])
    if kind == "JSONL":
        return InputRows(read_jsonl(files, prompts), unusable=prompts.reasons)
    tables = [_read_binary(file, kind) for file in files]
    for file, table in zip(files, tables, strict=True):
        if not table.schema.equals(tables[0].schema, check_metadata=False):
            raise UserError(
                f"--prompts: {file} has the columns {describe_columns(table.schema)}, but {files[0]} has "
                f"{describe_columns(tables[0].schema)}; all files must have the same columns and types"
            )
    ends = tuple(accumulate(table.num_rows for table in tables)) if kind == "Arrow" else None
    return InputRows(pa.concat_tables(tables), ends)


def _kind(path: Path) -> str:
    for kind, suffixes in KINDS.items():
        if path.name.endswith(suffixes):
            return kind
    raise UserError(
        f"--prompts {path} has an unknown file type: its name must end in one of {', '.join(SUFFIXES)}"
    )


def _saved_dataset_files(folder: Path) -> list[Path]:
    """The files of ``datasets.save_to_disk``, in the order of its ``state.json``."""
    state_path = folder / "state.json"
    try:
        state = parse_object(state_path.read_bytes())
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--prompts {folder}: state.json is not one written by save_to_disk: {error!r}"
        ) from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(
            f"--prompts {folder} selects its rows through an indices file: call flatten_indices() on the "
            "dataset and save it again"
        )
    if not files:
        raise UserError(f"--prompts {folder}: state.json names no data files")
    for file in files:
        if not file.is_file():
            raise UserError(f"--prompts {folder}: {file.name}, named in state.json, is missing")
    return files


def _folder_files(folder: Path) -> list[Path]:
    files = sorted(
        entry
        for entry in folder.iterdir()
        if entry.is_file() and entry.name.endswith(SUFFIXES) and not entry.name.startswith((".", "_"))
    )
    # Next to data of another type, a .json file is dataset_info.json or the like.
    files = [file for file in files if not file.name.endswith((".json", ".json.gz"))] or files
    if not files:
        raise UserError(f"--prompts {folder} contains no file that ends in one of {', '.join(SUFFIXES)}")
    num_files = Counter(_kind(file) for file in files)
    if len(num_files) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in num_files.items())
        raise UserError(f"--prompts {folder} mixes types of files ({counts}): give a folder of one type")
    return files


def _read_binary(path: Path, kind: str) -> pa.Table:
    try:
        table = _read_arrow(path) if kind == "Arrow" else pa.parquet.ParquetFile(path, memory_map=True).read()
        for column in table.columns:
            check_layout(column)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {path} is not a complete {kind} file (damaged or truncated?): {error}"
        ) from error
    return table


def _read_arrow(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    if source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
        return pa.ipc.open_file(source).read_all()
    # pyarrow does not notice that a stream was cut between two record batches.
    source.seek(max(source.size() - len(END_OF_STREAM), 0), os.SEEK_SET)
    if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise pa.ArrowInvalid("the stream has no end-of-stream marker")
    source.seek(0)
    return pa.ipc.open_stream(source).read_all()


def describe_columns(schema: pa.Schema) -> str:
    """``name (type), ...`` for messages."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "(none)"
