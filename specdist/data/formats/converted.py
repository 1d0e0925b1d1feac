"""The rows of text files (JSONL, CSV, OpenAI batches): of small ones in memory, of large ones in one Arrow
file on this machine's disk.

That is made once, by the first process of a machine that opens them, a few megabytes at a time, while the
files' digests are computed; every later start maps it, if the files have these digests still. Its name tells
path, size and time of the files. The rows are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.ipc

from specdist.data.formats.json_columns import as_schema, empty_table
from specdist.data.store.files import FileStamp, WatchedFiles, stamp_of, unique_tag, write_json
from specdist.data.store.storage import cache_folder
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields, parse_object

# Smaller files are read into memory; compressed ones grow.
LARGE_BYTES, LARGE_COMPRESSED_BYTES = 2**26, 2**23
ROWS_PER_BATCH = 4096

logger = logging.getLogger(__name__)


class Source(Protocol):
    """The rows of some files, in pieces. ``options``: those on which the rows depend, as JSON."""

    options: list[Any]

    def tables(self, digests: Sequence[Any] = ()) -> Iterator[tuple[pa.Table, pa.Schema]]:
        """A few megabytes at a time, with the types known so far. ``digests``: of every file, hash objects
        that get its bytes. Raises :class:`UserError` with the file and the line."""

    def finished(self, table: pa.Table) -> pa.Table:
        """Some of these rows as they are to be, once all have been read."""
        return table

    def findings(self) -> dict[str, Any]:
        """What else was found in the files, as JSON."""
        return {}

    def restore(self, findings: dict[str, Any]) -> None:
        """Take what :meth:`findings` returned when the files were read."""
        return


def text_rows(
    files: Sequence[Path], source: Source, cache_dir: str | None
) -> tuple[pa.Table, Sequence[FileStamp]]:
    """All rows; and the files with their digests, if these were computed meanwhile. Raises
    :class:`UserError` with the file and the line."""
    if sum(file.stat().st_size / _limit(file) for file in files) >= 1:
        return _converted(files, source, cache_dir)
    tables = list(source.tables())
    if not tables:
        return pa.table({}), ()
    schema = tables[-1][1]
    return source.finished(pa.concat_tables([as_schema(table, schema) for table, _ in tables])), ()


def _converted(
    files: Sequence[Path], source: Source, cache_dir: str | None
) -> tuple[pa.Table, Sequence[FileStamp]]:
    """Convert the files to an Arrow file, which is memory-mapped."""
    stamps = [stamp_of(file) for file in files]
    what = json.dumps([*source.options, [asdict(stamp) for stamp in stamps]])
    folder = cache_folder(cache_dir) / "inputs"
    path = folder / f"rows-{hashlib.sha256(what.encode()).hexdigest()[:16]}.arrow"
    about = path.with_suffix(".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (about.exists() and WatchedFiles(files).are(_digested(about))):
                logger.info("converting %s once, into %s", files[0].parent, path)
                digests = _convert(files, source, path)
                if [stamp_of(file) for file in files] != stamps:
                    raise UserError(
                        f"--prompts {files[0].parent}: files changed while they were read: start again once "
                        "nothing writes to them"
                    )
                known = [replace(stamp, sha256=sha) for stamp, sha in zip(stamps, digests, strict=True)]
                write_json(about, {"stamps": [asdict(stamp) for stamp in known], "told": source.findings()})
        source.restore(parse_object(about.read_bytes())["told"])
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"--prompts {files[0]} cannot be converted in {folder} ({error}): name a folder on a disk that "
            "has room for its rows with --cache_dir"
        ) from error
    return table, _digested(about)


def _digested(about: Path) -> list[FileStamp]:
    """The files of which the rows were made."""
    return [from_fields(FileStamp, stamp) for stamp in parse_object(about.read_bytes())["stamps"]]


def _convert(files: Sequence[Path], source: Source, path: Path) -> list[str]:
    """Returns the digests of the files. While types widen (integers to floats, say), rows go to one file
    after the other; at the end these become one."""
    pieces: list[Path] = []
    schema = pa.schema([])
    writer: pa.RecordBatchFileWriter | None = None
    digests = [hashlib.sha256() for _ in files]
    try:
        for table, known in source.tables(digests):
            if writer is None or not known.equals(schema):
                if writer is not None:
                    writer.close()
                schema = known
                pieces.append(path.with_name(f"{path.name}.{unique_tag()}.tmp"))
                writer = pa.ipc.new_file(str(pieces[-1]), schema)
            writer.write_table(as_schema(table, schema).combine_chunks(), max_chunksize=ROWS_PER_BATCH)
        if writer is not None:
            writer.close()
        whole = path.with_name(f"{path.name}.{unique_tag()}.tmp")
        pieces.append(whole)
        with pa.ipc.new_file(str(whole), source.finished(empty_table(schema)).schema) as last:
            for batch in _batches(pieces[:-1]):
                rows = as_schema(pa.Table.from_batches([batch]), schema)
                last.write_table(source.finished(rows.combine_chunks()))
        whole.replace(path)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)
    return [digest.hexdigest() for digest in digests]


def _batches(pieces: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        reader = pa.ipc.open_file(pa.memory_map(str(piece)))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _limit(file: Path) -> int:
    return LARGE_COMPRESSED_BYTES if file.suffix == ".gz" else LARGE_BYTES
