"""An Arrow table as JSON lines or CSV, a batch of rows at a time."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv


def write_jsonl(file: BinaryIO, table: pa.Table, rows_per_batch: int) -> None:
    """One object a line, with all columns. What JSON has no type for becomes text (times as ISO 8601, bytes
    as base64), and numbers that are not finite become null."""
    for batch in table.to_batches(max_chunksize=rows_per_batch):
        file.writelines(_line(row) for row in batch.to_pylist())


def write_csv(file: BinaryIO, table: pa.Table, rows_per_batch: int) -> None:
    """A header and one record a row. Lists and structures are JSON texts, bytes base64; an empty text is
    quoted, and null is not."""
    schema = pa.schema([pa.field(field.name, _csv_type(field.type)) for field in table.schema])
    with pa.csv.CSVWriter(file, schema) as writer:
        for batch in table.to_batches(max_chunksize=rows_per_batch):
            columns = [_csv_column(batch.column(name), schema.field(name).type) for name in schema.names]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{_json(row)}\n".encode()


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
    if isinstance(value, (Decimal, datetime.timedelta)):
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
    return pa.string() if pa.types.is_nested(kind) or _is_binary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )


def _csv_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_nested(column.type):
        return pa.array([None if value is None else _json(value) for value in column.to_pylist()], kind)
    if _is_binary(column.type):
        return pa.array([None if value is None else _as_text(value) for value in column.to_pylist()], kind)
    return column
