"""The files that ``--prompts`` names, and their rows."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.formats.batches import BODY, Batch, is_batch, read_batch
from specdist.data.formats.columns import common_schema, conformed
from specdist.data.formats.csv_files import read_csv
from specdist.data.formats.input_rows import InputRows, ParquetRows, TableRows
from specdist.data.formats.jsonl import PromptColumn, read_json
from specdist.data.formats.streams import reading
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

ARROW_FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
KINDS = {
    "Arrow": (".arrow",),
    "Parquet": (".parquet",),
    "JSONL": (".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    "CSV": (".csv", ".csv.gz"),
}
# How datasets tells splits by the names of files: by a word at their beginning or between others, and in a
# folder named data by those of shards.
SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
IN_NAME, SHARD = r"(.*[-._ 0-9])?({})[-._ 0-9]", re.compile(r"(.+)-\d{5}-of-\d{5}.*\.")
SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)


def shown(paths: Sequence[str]) -> str:
    """Paths for messages: the first, and how many more."""
    return paths[0] + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")


def globbed(paths: Sequence[str]) -> list[str]:
    """The paths, and in the place of a glob those that it names, sorted."""
    # Path.glob takes no pattern that begins at the root.
    found = ([] if os.path.lexists(path) else glob(path, recursive=True) for path in paths)  # noqa: PTH207
    return [name for path, names in zip(paths, found, strict=True) for name in sorted(names) or [path]]


def files_at(path: str, place: Path) -> list[Path]:
    """The data files of a path of ``--prompts``, which are at this place, in row order. Raises
    :class:`UserError` if there are none, and for files of several splits."""
    with reading(place):
        files = find_files(place)
    check_split(path, files)
    return files


def find_files(path: Path) -> list[Path]:
    """The data files at ``path``, in row order. Raises :class:`UserError` if there are none."""
    if path.is_file():
        _kind(path)
        return [path]
    if not path.is_dir():
        raise UserError(f"--prompts {path}: no such file or folder; check its spelling")
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise UserError(f"--prompts {path} is a DatasetDict: give the folder of one of its splits ({splits})")
    if (path / "state.json").is_file():
        return _saved_dataset_files(path)
    return _folder_files(path)


def check_split(path: str, files: Sequence[Path]) -> None:
    """Raises :class:`UserError` for files of several splits of a data set."""
    found: list[set[str]] = []
    for file in files:
        shard = SHARD.match(file.name) if Path(path).name == "data" else None
        words = (split for split, words in SPLITS.items() if re.match(IN_NAME.format(words), file.name))
        found += [named] if (named := {shard[1]} if shard else set(words)) else []
    if found and not set.intersection(*found):
        raise UserError(
            f"--prompts {path} has files of several splits ({', '.join(sorted(set().union(*found)))}), by "
            "their names: give one of the files, or a folder with those of one split"
        )


@dataclass(frozen=True)
class Inputs:
    """All rows; ``unusable`` and ``batch`` as in :class:`specdist.data.Prompts`."""

    rows: InputRows
    unusable: Mapping[int, str] = field(default_factory=dict)
    batch: Batch | None = None


def read_inputs(path: str, files: list[Path], prompts: PromptColumn) -> Inputs:
    """All rows of files of one type: Arrow files are memory-mapped, and of Parquet files a few row groups are
    in memory at a time; rows of text files are all in memory. Raises :class:`UserError` with the file."""
    num_files = Counter(_kind(file) for file in files)
    if len(num_files) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in num_files.items())
        raise UserError(f"--prompts {path} mixes types of files ({counts}): give those of one type")
    kind = _kind(files[0])
    if kind == "JSONL" and not prompts.is_chat and prompts.name in ("prompt", BODY) and is_batch(files):
        batch, table = read_batch(files)
        return Inputs(TableRows(table), batch.reasons, batch)
    if kind == "JSONL":
        return Inputs(TableRows(read_json(files, prompts)), unusable=prompts.reasons)
    if kind == "CSV":
        return Inputs(TableRows(read_csv(files, prompts.name)))
    if kind == "Parquet":
        return Inputs(_parquet_rows(files))
    tables = [_read_arrow(file) for file in files]
    schema = common_schema(files, [table.schema for table in tables])
    tables = [conformed(table, schema) for table in tables]
    return Inputs(TableRows(pa.concat_tables(tables), tuple(accumulate(table.num_rows for table in tables))))


def _parquet_rows(files: list[Path]) -> ParquetRows:
    """Every row group is decoded once, so that a damaged file is found before any model is loaded."""
    metadata = []
    for file in files:
        with _refusing(file, "Parquet"):
            metadata.append(pa.parquet.read_metadata(file, memory_map=True))
            metadata[-1].schema.to_arrow_schema()
    schema = common_schema(files, [found.schema.to_arrow_schema() for found in metadata])
    rows = ParquetRows(files, metadata, schema)
    for number in range(rows.num_groups):
        with _refusing(rows.file_of(number), "Parquet"):
            rows.check(number)
    return rows


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
            f"--prompts {folder}: state.json is not one written by save_to_disk ({error!r}): save the "
            "dataset again, or copy the whole folder again"
        ) from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(
            f"--prompts {folder} selects its rows through an indices file: call flatten_indices() on the "
            "dataset and save it again"
        )
    if not files:
        raise UserError(f"--prompts {folder}: state.json names no data files: save the dataset again")
    for file in files:
        if not file.is_file():
            raise UserError(
                f"--prompts {folder}: {file.name}, named in state.json, is missing: copy the whole "
                "folder again"
            )
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
        raise UserError(
            f"--prompts {folder} contains no file that ends in one of {', '.join(SUFFIXES)}: give the folder "
            "with the files themselves (folders in it are not searched)"
        )
    return files


@contextlib.contextmanager
def _refusing(path: Path, kind: str) -> Iterator[None]:
    try:
        with reading(path):
            yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {path} is not a complete {kind} file (damaged, truncated, of another type, or with "
            f"text that is not UTF-8?): {error}"
        ) from error


def _read_arrow(path: Path) -> pa.Table:
    with _refusing(path, "Arrow"):
        table = _mapped(path)
        # Arrow trusts the offsets in a file: a damaged one reads outside of its buffer.
        table.validate(full=True)
    return table


def _mapped(path: Path) -> pa.Table:
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
