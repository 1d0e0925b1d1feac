"""Large JSONL files as one Arrow file on this machine's disk, so that their rows need no memory.

Made once, by the first process of a machine that opens them, a few megabytes at a time, while the files'
digests are computed; every later start maps it. Its name tells the files as they are (path, size, time), so
changed files are converted anew. The rows are those of :func:`specdist.data.jsonl.read_jsonl`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from specdist.data.files import FileStamp, stamp_of, unique_tag, write_json
from specdist.data.jsonl import PromptColumn, json_tables
from specdist.data.storage import spool_folder
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields, parse_object

# Smaller files are read into memory; compressed ones grow.
LARGE_BYTES, LARGE_COMPRESSED_BYTES = 2**26, 2**23
ROWS_PER_BATCH = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converted:
    """``stamps``: of the files, with their digests."""

    table: pa.Table
    stamps: list[FileStamp]


def is_large(files: Sequence[Path]) -> bool:
    """Whether these files are to be converted."""
    return sum(file.stat().st_size / _limit(file) for file in files) >= 1


def converted(files: list[Path], prompts: PromptColumn, spool: str | None) -> Converted:
    """The rows of the files, memory-mapped; what is wrong with prompts is in ``prompts``. Raises
    :class:`UserError` with the file and the line."""
    stamps = [stamp_of(file) for file in files]
    what = json.dumps([prompts.name, prompts.is_chat, prompts.is_turns, [asdict(stamp) for stamp in stamps]])
    folder = spool_folder(spool) / "inputs"
    path = folder / f"rows-{hashlib.sha256(what.encode()).hexdigest()[:16]}.arrow"
    about = path.with_suffix(".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not about.exists():
                logger.info("converting %s once, into %s", files[0].parent, path)
                digests = _convert(files, prompts, path)
                if [stamp_of(file) for file in files] != stamps:
                    raise UserError(f"--prompts {files[0].parent}: files changed while they were read")
                known = [replace(stamp, sha256=sha) for stamp, sha in zip(stamps, digests, strict=True)]
                write_json(about, {
                    "stamps": [asdict(stamp) for stamp in known], "num_usable": prompts.num_usable,
                    "reasons": [[row, reason] for row, reason in prompts.reasons.items()],
                })  # fmt: skip
        told = parse_object(about.read_bytes())
        prompts.num_usable, prompts.reasons = told["num_usable"], dict(told["reasons"])
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"--prompts {files[0]} cannot be converted in {folder} ({error}): name a folder on a disk that "
            "has room for its rows with --spool"
        ) from error
    return Converted(table, [from_fields(FileStamp, stamp) for stamp in told["stamps"]])


def _convert(files: list[Path], prompts: PromptColumn, path: Path) -> list[str]:
    """Returns the digests of the files. While types widen (integers to floats, say), rows go to one file
    after the other; at the end these become one."""
    pieces: list[Path] = []
    schema = pa.schema([])
    writer: pa.RecordBatchFileWriter | None = None
    digests = [hashlib.sha256() for _ in files]
    try:
        for table, known in json_tables(files, prompts, digests):
            if writer is None or not known.equals(schema):
                if writer is not None:
                    writer.close()
                schema = known
                pieces.append(path.with_name(f"{path.name}.{unique_tag()}.tmp"))
                writer = pa.ipc.new_file(str(pieces[-1]), schema)
            writer.write_table(_as(table, schema), max_chunksize=ROWS_PER_BATCH)
        if writer is not None:
            writer.close()
        whole = path.with_name(f"{path.name}.{unique_tag()}.tmp")
        pieces.append(whole)
        with pa.ipc.new_file(str(whole), schema) as last:
            for batch in _batches(pieces[:-1]):
                last.write_table(_as(pa.Table.from_batches([batch]), schema))
        whole.replace(path)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)
    return [digest.hexdigest() for digest in digests]


def _as(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With all columns of a wider schema."""
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive").combine_chunks()


def _batches(pieces: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        reader = pa.ipc.open_file(pa.memory_map(str(piece)))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _limit(file: Path) -> int:
    return LARGE_COMPRESSED_BYTES if file.suffix == ".gz" else LARGE_BYTES
