"""Columns of JSON: values of any form, as text of Arrow's extension type ``arrow.json``.

A struct has the keys of all rows, in one order and with one type each. So objects that differ in these are
kept as JSON text, which ``datasets`` reads and writes as its feature ``Json``: their keys and nulls are their
own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from specdist.data.formats.columns import is_list
from specdist.utils.json_values import parse_json


class JsonError(ValueError):
    """Text of a column of JSON that is not JSON."""


class Shapes:
    """What the objects in a column's values have been like so far."""

    def __init__(self) -> None:
        # The keys of objects in their order, and the types, by the place in a value.
        self._found: dict[tuple[str | int, ...], Any] = {}
        self.has_objects = self.is_mixed = False

    def see(self, value: Any, place: tuple[str | int, ...] = ()) -> None:
        """Raises OverflowError for an integer beyond 64 bits."""
        if value is None:
            return
        shape: Any = type(value)
        if shape is dict:
            self.has_objects, shape = True, tuple(value)
            for name, inner in value.items():
                self.see(inner, (*place, name))
        elif shape is list:
            for inner in value:
                self.see(inner, (*place, 0))
        elif shape is int and not -(2**63) <= value < 2**63:
            # pandas and datasets read no more than these from JSON.
            if not 0 < value < 2**64:
                raise OverflowError(f"{value} has more than 64 bits")
            self.is_mixed = True
        # An object without keys has no struct that every reader takes.
        if not self.need_json and (self._found.setdefault(place, shape) != shape or shape == ()):
            self.is_mixed = True

    @property
    def need_json(self) -> bool:
        """Whether a struct would change an object: its keys, their order, or the type of a value."""
        return self.has_objects and self.is_mixed


def json_array(values: list[Any]) -> pa.Array:
    """Values as JSON; None is null. Raises UnicodeEncodeError for text that has no UTF-8."""
    texts = [None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
             for value in values]  # fmt: skip
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """The rows of tables whose types, and columns, became more with each: those of ``schema`` at last."""
    return pa.concat_tables([empty_table(schema), *(_as_schema(table, schema) for table in tables)])


def _as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with all columns of a wider schema, where another column of them may be one of JSON."""
    if table.schema.equals(schema):
        return table
    for number, field in enumerate(table.schema):
        if schema.field(field.name).type == pa.json_() != field.type:
            chunks = [json_array(chunk.to_pylist()) for chunk in table.column(number).chunks]
            table = table.set_column(number, field.name, pa.chunked_array(chunks, pa.json_()))
    return pa.concat_tables([empty_table(schema), table], promote_options="permissive")


def empty_table(schema: pa.Schema) -> pa.Table:
    """A table without rows. ``schema.empty_table()`` is not implemented for JSON."""
    return pa.Table.from_batches([], schema)


def holds_json(kind: pa.DataType) -> bool:
    """Whether there is JSON in its values."""
    return holds(kind, lambda inner: isinstance(inner, pa.JsonType))


def holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one within it, passes the test."""
    return test(kind) or any(holds(kind.field(number).type, test) for number in range(kind.num_fields))


def values_of(column: pa.ChunkedArray | pa.Array, *, drops_absent: bool = False) -> list[Any]:
    """A column's values in Python, JSON as what it says.

    With ``drops_absent`` structs come without their null fields: a struct has every key, so that a null is
    how it says that a row has none. Raises :class:`JsonError`.
    """
    values: list[Any] = column.to_pylist()
    if not holds(column.type, lambda kind: isinstance(kind, pa.JsonType) or pa.types.is_nested(kind)):
        return values
    return [_read(value, column.type, drops_absent) for value in values]


def rows_of(table: pa.Table | pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a table as dictionaries, JSON as what it says."""
    columns = [values_of(column) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.schema.names, values, strict=True))


def _read(value: Any, kind: pa.DataType, drops_absent: bool) -> Any:
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        try:
            return parse_json(value.encode())
        except ValueError as error:
            raise JsonError(str(error)) from error
    if pa.types.is_struct(kind):
        return {
            field.name: _read(value[field.name], field.type, drops_absent)
            for field in kind
            if not (drops_absent and value[field.name] is None)
        }
    if pa.types.is_map(kind):
        found = {name: _read(item, kind.item_type, drops_absent) for name, item in value}
        if len(found) < len(value):
            raise JsonError("a map has a key twice, which an object cannot have")
        return found
    if is_list(kind):
        return [_read(item, kind.value_type, drops_absent) for item in value]
    return value
