"""JSON lines to an Arrow table, a few megabytes of Python objects at a time.

pyarrow's own JSON reader turns text that looks like a date into a timestamp, and cannot say which line is
wrong.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from specdist.data.formats.json_columns import Shapes, joined, json_array
from specdist.data.formats.messages import described, why_not_messages, why_not_text, why_not_turns
from specdist.data.formats.streams import open_input, reading
from specdist.utils.errors import UserError

CHUNK_BYTES = 2**24
# OverflowError: an integer beyond 64 bits.
CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException)


@dataclass
class PromptColumn:
    """The column of prompts while a file is read.

    A value of the wrong type spoils its row, not the file. Since an Arrow column has one type, the value is
    replaced by null before the conversion, and the reason is kept.

    Attributes:
        is_chat: whether it must hold lists of messages; else it must hold text.
        is_turns: or lists of texts.
        reasons: why rows cannot be used, by row number; nulls are not among them.
        num_usable: number of values of the right type.
    """

    name: str
    is_chat: bool
    reasons: dict[int, str] = field(default_factory=dict)
    num_usable: int = 0
    is_turns: bool = False

    def clean(self, row: int, values: dict[str, Any]) -> None:
        """Replace the prompt in a row's ``values`` by null if it has the wrong type."""
        value = values.get(self.name)
        if value is None:
            return
        find: Callable[[str, Any], str | None] = why_not_messages if self.is_chat else why_not_text
        reason = why_not_turns(self.name, value) if self.is_turns else find(self.name, value)
        if reason is None:
            self.num_usable += 1
        else:
            self.reasons[row] = reason
            values[self.name] = None

    def check(self, path: str) -> None:
        """Raises :class:`UserError` if every value has the wrong type: then the column is wrong."""
        if self.reasons and not self.num_usable:
            option, other = ("messages_column", "for plain text use --prompt_column")
            if self.is_turns:
                option = "turns_column"
            elif not self.is_chat:
                option, other = ("prompt_column", "for chat messages use --messages_column")
            row, reason = next(iter(self.reasons.items()))
            raise UserError(
                f"--{option} {self.name} has no usable prompt in --prompts {path}: in row {row}, {reason}; "
                f"{other}"
            )


@dataclass(frozen=True)
class Chunk:
    """Consecutive objects of a file, and the place of each, such as ``line 3``."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)


def read_json(files: Sequence[Path], prompts: PromptColumn) -> pa.Table:
    """The rows of files, which must have the same keys and compatible types.

    Integers become floats if other rows have floats, and a missing key is null. A column with objects that a
    struct would change is one of JSON: see :mod:`specdist.data.formats.json_columns`. A prompt of the wrong
    type becomes null, with the reason in ``prompts``. Raises :class:`UserError` with the file and the line.
    """
    known, tables = pa.schema([]), []
    shapes: dict[str, Shapes] = {}
    num_rows = 0
    names_of_file: dict[Path, set[str]] = {}
    for path in files:
        for chunk in json_chunks(path):
            for values in chunk.rows:
                prompts.clean(num_rows, values)
                num_rows += 1
            before = deepcopy(shapes)
            try:
                table, known = _convert(chunk.rows, known, shapes)
            except CONVERSION_ERRORS as error:
                raise _bad_line(path, chunk, known, before, error) from error
            names_of_file.setdefault(path, set()).update(table.column_names)
            tables.append(table)
    _check_same_names(names_of_file)
    return joined(tables, known)


def _check_same_names(names_of_file: dict[Path, set[str]]) -> None:
    for path, names in names_of_file.items():
        first_path, first_names = next(iter(names_of_file.items()))
        if names != first_names:
            raise UserError(
                f"--prompts: {path} has the columns {', '.join(sorted(names))}, but {first_path} has "
                f"{', '.join(sorted(first_names))}; all files must have the same columns"
            )


def json_chunks(path: Path, num_bytes_each: int | None = None) -> Iterator[Chunk]:
    """The objects of a file, a few megabytes at a time: one per line, or all in one array. Raises
    :class:`UserError` with the line or row."""
    chunk, num_bytes = Chunk(), 0
    with reading(path), open_input(path) as file:
        for place, size, row in _values(path, file):
            if not isinstance(row, dict):
                raise UserError(
                    f"--prompts {path}, {place} is {described(row)}, not an object; the file must hold one "
                    "JSON object per line, or an array of objects"
                )
            chunk.rows.append(row)
            chunk.places.append(place)
            num_bytes += size
            if num_bytes >= (num_bytes_each or CHUNK_BYTES):
                yield chunk
                chunk, num_bytes = Chunk(), 0
    if chunk.rows:
        yield chunk


def _values(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, Any]]:
    """The place, about the number of bytes, and the value of every row."""
    is_first = True
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        value = _parsed(line)
        if is_first and not isinstance(value, dict):
            content = line + file.read()
            whole = _parsed(content)
            if isinstance(whole, list):
                for row, each in enumerate(whole):
                    yield f"row {row}", len(content) // len(whole), each
                return
            if isinstance(whole, dict):
                raise UserError(
                    f"--prompts {path} is one JSON object over several lines, with the keys "
                    f"{', '.join(whole)}; the file must hold one JSON object per line, or an array of objects"
                )
            if line.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[" and isinstance(value, Exception):
                value = whole
                number += getattr(whole, "lineno", 1) - 1
        if isinstance(value, RecursionError):
            raise UserError(
                f"--prompts {path}, line {number} has lists or objects that are too deep within others: "
                "write such a value as text"
            ) from value
        if isinstance(value, ValueError):
            raise UserError(
                f"--prompts {path}, line {number} is not valid JSON: {_describe_error(value)}; the file "
                "must hold one JSON object per line, or an array of objects, in UTF-8"
            ) from value
        yield f"line {number}", len(line), value
        is_first = False


def _parsed(text: bytes) -> Any:
    """A value; or the error, if it is none."""
    try:
        return json.loads(text.removeprefix(codecs.BOM_UTF8).rstrip().decode())
    except (ValueError, RecursionError) as error:
        return error


def _describe_error(error: ValueError) -> str:
    """Describe the error without its line, which json counts within its text."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.colno - 1}"
    return str(error)


def _convert(
    rows: list[dict[str, Any]], known: pa.Schema, shapes: dict[str, Shapes]
) -> tuple[pa.Table, pa.Schema]:
    """The rows as a table, and the known types, widened by theirs; ``shapes`` of the columns so far are
    added to. Raises ``CONVERSION_ERRORS``."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table(
        {
            name: _column(name, [row.get(name) for row in rows], shapes.setdefault(name, Shapes()))
            for name in names
        }
    )
    return table, _unified([known, table.schema])


def _unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """All columns; where one has JSON, it is one of JSON."""
    fields = {field.name: field for schema in schemas for field in schema}
    is_json = {field.name for schema in schemas for field in schema if field.type == pa.json_()}
    plain = [pa.schema([field for field in schema if field.name not in is_json]) for schema in schemas]
    types = pa.unify_schemas(plain, promote_options="permissive")
    return pa.schema([(name, pa.json_() if name in is_json else types.field(name).type) for name in fields])


def _column(name: str, values: list[Any], shapes: Shapes) -> pa.Array:
    try:
        for value in values:
            shapes.see(value)
        if shapes.need_json:
            return json_array(values)
        return pa.array(values)
    except CONVERSION_ERRORS as error:
        raise ValueError(f"column {name}: {error}") from error


def _bad_line(
    path: Path, chunk: Chunk, known: pa.Schema, shapes: dict[str, Shapes], error: Exception
) -> UserError:
    """Names the last row of the chunk's shortest prefix that does not convert, found by bisection."""
    num_good, num_bad = 0, len(chunk.rows)
    while num_bad - num_good > 1:
        middle = (num_good + num_bad) // 2
        try:
            _convert(chunk.rows[:middle], known, deepcopy(shapes))
            num_good = middle
        except CONVERSION_ERRORS as earlier_error:
            num_bad, error = middle, earlier_error
    return UserError(
        f"--prompts {path}, {chunk.places[num_bad - 1]} cannot be kept as it is: {error}; a column has "
        "one type in all rows, integers have 64 bits, and text is UTF-8, without halves of characters "
        "(surrogates): correct it, write the values as text, or leave the column out"
    )
