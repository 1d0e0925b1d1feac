"""All shards of a complete run, each verified, as one Arrow, Parquet or JSON lines file."""

from __future__ import annotations

import base64
import datetime
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.formats.json_columns import JsonError, holds, rows_of
from specdist.data.run.manifest import ShardPlan
from specdist.data.run.publishing import ROWS_PER_BATCH
from specdist.data.run.reading import open_shard
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import write_atomically
from specdist.utils.errors import UserError

# Errors of values that a format, or Python, does not have.
MERGE_ERRORS = (pa.ArrowException, TypeError, OverflowError, JsonError)
SUFFIXES = (".arrow", ".parquet", ".jsonl")
# Small shards are written together, up to so many rows or bytes.
ROWS_PER_PIECE, BYTES_PER_PIECE = 2**16, 2**28


def merge_run(folder: RunFolder, output: Path, *, overwrite: bool = False) -> int:
    """Write all rows in input order, in the format that ``output``'s suffix names; returns their number.

    Raises :class:`UserError` if the run is not complete, if a shard does not match its record or the
    manifest, if ``output`` exists, or if its format cannot hold a column.
    """
    check_output(output, SUFFIXES, overwrite=overwrite)
    tables = verified_tables(folder)
    schema = open_shard(folder.paths(0), verify=False).schema
    if any(holds(kind, pa.types.is_dictionary) for kind in schema.types):
        # The file format allows one dictionary per column, so that all have to be known.
        tables = iter([pa.concat_tables(tables).unify_dictionaries()])
    num_rows = 0

    def pieces() -> Iterator[pa.Table]:
        nonlocal num_rows
        for piece in _joined(tables):
            num_rows += piece.num_rows
            yield piece

    try:
        write_atomically(output, lambda file: _write(file, schema, pieces(), output.suffix))
    except MERGE_ERRORS as error:
        raise UserError(f"--output {output} cannot hold these columns ({error}): use .arrow") from error
    return num_rows


def check_output(output: Path, suffixes: Sequence[str], *, overwrite: bool) -> None:
    """Raises :class:`UserError` for a file of another type, or one that exists."""
    if output.suffix not in suffixes:
        raise UserError(
            f"--output {output} must end in {'one of ' * (len(suffixes) > 1)}{', '.join(suffixes)}"
        )
    if output.exists() and not overwrite:
        raise UserError(f"--output {output} exists: give another name, or --overwrite to replace it")


def verified_tables(folder: RunFolder) -> Iterator[pa.Table]:
    """The rows of each shard of a complete run in order, compared with its record. Raises :class:`UserError`
    if the run is not complete, and where a shard is damaged or has other columns or rows than planned."""
    missing = folder.missing_shards()
    if missing:
        raise UserError(folder.missing_message(missing))
    return _verified(folder, folder.plan())


def _verified(folder: RunFolder, plan: ShardPlan) -> Iterator[pa.Table]:
    schema = None
    for shard in range(plan.num_shards):
        path, table = folder.data_path(shard), open_shard(folder.paths(shard), verify=True)
        schema = schema or table.schema
        if not table.schema.equals(schema):
            raise UserError(f"{path} does not have the columns of {folder.data_path(0)}")
        if not _is_planned(plan, shard, table):
            (first, end), num_samples = plan.bounds(shard), plan.num_samples
            of_each = f"{num_samples} of each" if plan.completions_per_shard is None else "of each"
            raise UserError(
                f"{path} has {table.num_rows} rows; the manifest says {plan.num_completions_of(shard)}: "
                f"{of_each} input row from {first} to {end - 1}, in order"
            )
        yield table


def _is_planned(plan: ShardPlan, shard: int, table: pa.Table) -> bool:
    """Whether these are the rows of this shard, as many and in the order as planned."""
    row_ids, samples = table["row_id"].to_numpy(), table["sample_index"].to_numpy()
    begins = np.flatnonzero(np.diff(row_ids, prepend=-1))
    counts = np.diff(begins, append=len(row_ids))
    return bool(
        table.num_rows == plan.num_completions_of(shard)
        and np.array_equal(row_ids[begins], np.arange(*plan.bounds(shard)))
        and np.array_equal(samples, np.arange(len(row_ids)) - np.repeat(begins, counts))
        and (plan.completions_per_shard is not None or (counts == plan.num_samples).all())
    )


def _joined(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Small tables together: a piece of a file for each shard would make it slow to read."""
    piece: list[pa.Table] = []
    num_rows = num_bytes = 0
    for table in tables:
        num_rows, num_bytes = num_rows + table.num_rows, num_bytes + table.nbytes
        if piece and (num_rows > ROWS_PER_PIECE or num_bytes > BYTES_PER_PIECE):
            yield _as_one(piece)
            piece, num_rows, num_bytes = [], table.num_rows, table.nbytes
        piece.append(table)
    yield _as_one(piece)


def _as_one(tables: Sequence[pa.Table]) -> pa.Table:
    """A large one stays memory-mapped."""
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()


def _write(file: BinaryIO, schema: pa.Schema, pieces: Iterator[pa.Table], suffix: str) -> None:
    if suffix == ".parquet":
        with pa.parquet.ParquetWriter(file, schema) as writer:
            for piece in pieces:
                writer.write_table(piece)
    elif suffix == ".jsonl":
        _write_jsonl(file, pieces)
    else:
        options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for piece in pieces:
                writer.write_table(piece, max_chunksize=ROWS_PER_BATCH)


def _write_jsonl(file: BinaryIO, pieces: Iterator[pa.Table]) -> None:
    """An object per line. Values without a JSON type become text (times as ISO 8601, bytes as base64), and
    numbers that are not finite become null."""
    batches = (batch for piece in pieces for batch in piece.to_batches(max_chunksize=ROWS_PER_BATCH))
    for batch in batches:
        for place, field in enumerate(batch.schema):
            if field.type == pa.time64("ns"):  # Python's has no nanoseconds
                batch = batch.set_column(place, field.name, batch.column(place).cast(pa.string()))
        file.writelines(f"{_json(row)}\n".encode() for row in rows_of(batch))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=_as_text)


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (Decimal, datetime.timedelta, uuid.UUID)):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} cannot be written as text")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
