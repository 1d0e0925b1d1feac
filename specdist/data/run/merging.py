"""All shards of a complete run, each verified, as one Arrow, Parquet, JSON lines or CSV file."""

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
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from specdist.data.formats.json_columns import JsonError, rows_of, values_of
from specdist.data.run.manifest import ShardPlan
from specdist.data.run.publishing import ROWS_PER_BATCH
from specdist.data.run.reading import open_shard, verified_shard
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import write_atomically
from specdist.data.store.storage import read_ahead
from specdist.utils.errors import UserError

# Of values that a format, or Python, does not have.
MERGE_ERRORS = (pa.ArrowException, TypeError, OverflowError, JsonError)
SUFFIXES = (".arrow", ".parquet", ".jsonl", ".csv")
ROWS_PER_PIECE = 2**16
# So many are read at a time.
SHARDS_PER_READ = 16
# Batches of fewer rows are joined, as long as that takes no more memory than this.
FEWEST_ROWS_PER_BATCH, MAX_JOINED_BYTES = ROWS_PER_BATCH // 4, 2**28


def merge_run(folder: RunFolder, output: Path, *, overwrite: bool = False) -> int:
    """Write all rows in input order, in the format that ``output``'s suffix names; returns their number.

    Raises :class:`UserError` if the run is not complete, if a shard does not match its record or the
    manifest, if ``output`` exists, or if its format cannot hold a column.
    """
    check_output(output, SUFFIXES, overwrite=overwrite)
    tables = verified_tables(folder)
    schema = open_shard(folder.paths(0), verify=False).schema
    if _has_dictionaries(schema):
        # The file format allows one dictionary per column, so that all have to be known.
        tables = iter([pa.concat_tables(tables).unify_dictionaries()])
    num_rows = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal num_rows
        for table in tables:
            num_rows += table.num_rows
            yield table

    try:
        write_atomically(output, lambda file: _write(file, schema, counted(), output.suffix))
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
    """The rows of a complete run in order, a table of one or more shards at a time, compared with their
    records. Raises :class:`UserError` if the run is not complete, and where a shard is damaged."""
    plan = folder.plan()
    missing = folder.missing_shards()
    if missing:
        raise UserError(folder.missing_message(missing))
    return _pieces(folder, plan)


def _pieces(folder: RunFolder, plan: ShardPlan) -> Iterator[pa.Table]:
    """Of several shards together: a piece of a file for each shard would make it slow to read. Raises
    :class:`UserError` for damage, and for other columns."""
    read = [range(plan.num_shards)[start:][:SHARDS_PER_READ]
            for start in range(0, plan.num_shards, SHARDS_PER_READ)]  # fmt: skip
    piece: list[pa.Table] = []
    num_rows = shard = 0
    first = None
    for tables in read_ahead(lambda shards: [verified_shard(folder.paths(shard)) for shard in shards], read):
        for table in tables:
            first = table if first is None else first
            piece.append(table)
            num_rows += table.num_rows
            is_last = shard + len(piece) == plan.num_shards
            if is_last or num_rows >= ROWS_PER_PIECE:
                yield _joined(folder, plan, shard, piece, first.schema)
                shard += len(piece)
                piece, num_rows = [], 0


def _joined(
    folder: RunFolder, plan: ShardPlan, shard: int, tables: Sequence[pa.Table], schema: pa.Schema
) -> pa.Table:
    """The rows of this shard and those that follow, small batches together. Raises :class:`UserError` for
    other columns, and for rows that the manifest does not have there."""
    other = next((place for place, table in enumerate(tables) if not table.schema.equals(schema)), None)
    if other is not None:
        paths = folder.data_path(shard + other), folder.data_path(0)
        raise UserError(f"{paths[0]} does not have the columns of {paths[1]}")
    joined = pa.concat_tables(tables)
    if not _is_planned(plan, shard, tables, joined):
        wrong = (place for place, table in enumerate(tables)
                 if not _is_planned(plan, shard + place, [table], table))  # fmt: skip
        place = next(wrong)
        raise _unplanned(folder, plan, shard + place, tables[place].num_rows)
    has_small = joined.num_rows < FEWEST_ROWS_PER_BATCH * joined["row_id"].num_chunks
    # Dictionaries may differ: those of all shards are needed to join them.
    if not has_small or _has_dictionaries(schema):
        return joined
    # To add up all of these takes longer than to join them.
    num_bytes = SHARDS_PER_READ * sum(table.nbytes for table in tables[::SHARDS_PER_READ])
    return joined.combine_chunks() if num_bytes <= MAX_JOINED_BYTES else joined


def _has_dictionaries(schema: pa.Schema) -> bool:
    return any(_has_dictionary(field.type) for field in schema)


def _has_dictionary(kind: pa.DataType) -> bool:
    children = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, children))


def _is_planned(plan: ShardPlan, shard: int, tables: Sequence[pa.Table], joined: pa.Table) -> bool:
    """Whether these are the rows of this shard and those that follow, as many and in the order as planned."""
    shards = range(shard, shard + len(tables))
    if [table.num_rows for table in tables] != [plan.num_completions_of(each) for each in shards]:
        return False
    row_ids, sample_ids = joined["row_id"].to_numpy(), joined["sample_index"].to_numpy()
    begins = np.flatnonzero(np.diff(row_ids, prepend=-1))
    counts = np.diff(begins, append=len(row_ids))
    samples = np.arange(len(row_ids)) - np.repeat(begins, counts)
    firsts = [plan.bounds(each)[0] for each in shards]
    starts = np.cumsum([0, *(table.num_rows for table in tables[:-1])])
    return bool(
        np.array_equal(row_ids[begins], np.arange(firsts[0], plan.bounds(shards[-1])[1]))
        and np.array_equal(row_ids[starts], firsts)
        and np.isin(starts, begins).all()
        and np.array_equal(sample_ids, samples)
        and (plan.completions_per_shard is not None or (counts == plan.num_samples).all())
    )


def _unplanned(folder: RunFolder, plan: ShardPlan, shard: int, num_rows: int) -> UserError:
    (first, end), num_samples = plan.bounds(shard), plan.num_samples
    of_each = f"{num_samples} of each" if plan.completions_per_shard is None else "of each"
    return UserError(
        f"{folder.data_path(shard)} has {num_rows} rows; the manifest says {plan.num_completions_of(shard)}: "
        f"{of_each} input row from {first} to {end - 1}, in order"
    )


def _write(file: BinaryIO, schema: pa.Schema, pieces: Iterator[pa.Table], suffix: str) -> None:
    if suffix == ".parquet":
        with pa.parquet.ParquetWriter(file, schema) as writer:
            for piece in pieces:
                writer.write_table(piece)
    elif suffix == ".jsonl":
        _write_jsonl(file, pieces)
    elif suffix == ".csv":
        _write_csv(file, schema, pieces)
    else:
        options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for piece in pieces:
                writer.write_table(piece, max_chunksize=ROWS_PER_BATCH)


def _write_jsonl(file: BinaryIO, pieces: Iterator[pa.Table]) -> None:
    """An object per line. Values without a JSON type become text (times as ISO 8601, bytes as base64), and
    numbers that are not finite become null."""
    for batch in _batches(pieces):
        for place, field in enumerate(batch.schema):
            if field.type == pa.time64("ns"):  # Python's has no nanoseconds
                batch = batch.set_column(place, field.name, batch.column(place).cast(pa.string()))
        file.writelines(f"{_json(row)}\n".encode() for row in rows_of(batch))


def _write_csv(file: BinaryIO, columns: pa.Schema, pieces: Iterator[pa.Table]) -> None:
    """A header and a record per row. Lists and structures are written as JSON, bytes as base64; empty text is
    quoted, null is not."""
    schema = pa.schema([pa.field(field.name, _csv_type(field.type)) for field in columns])
    with pa.csv.CSVWriter(file, schema) as writer:
        for batch in _batches(pieces):
            written = [_csv_column(batch.column(name), schema.field(name).type) for name in schema.names]
            writer.write_batch(pa.record_batch(written, schema=schema))


def _batches(pieces: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield from piece.to_batches(max_chunksize=ROWS_PER_BATCH)


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


def _csv_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _csv_type(kind.value_type)
    is_text = _is_structured(kind) or _is_binary(kind) or kind == pa.string_view()
    return pa.string() if is_text else kind


def _is_structured(kind: pa.DataType) -> bool:
    return pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _csv_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_structured(column.type):
        return pa.array([None if value is None else _json(value) for value in values_of(column)], kind)
    if _is_binary(column.type):
        return pa.array([None if value is None else _as_text(value) for value in column.to_pylist()], kind)
    return column if column.type == kind else column.cast(kind)
