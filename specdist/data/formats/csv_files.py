"""CSV files to an Arrow table.

pyarrow guesses a column's type from the beginning of the file, makes dates of what looks like one, and 7 of
``007``. So every field is read as text here, and a column becomes one of numbers or truth values only where
each of its fields is that value's usual form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from specdist.data.formats.columns import check_names
from specdist.data.formats.converted import Source
from specdist.data.formats.streams import READ_BYTES, open_input, reading
from specdist.data.formats.text import bytes_as_text, text_as_bytes
from specdist.utils.errors import UserError

# A row must fit into a block.
BLOCK_BYTES = 2**26
# All fields of a column: its type. More digits than 64 bits hold would be lost.
TYPES = (
    (r"^-?(0|[1-9][0-9]{0,17})$", pa.int64()),
    (r"^-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][+-]?[0-9]+)?$", pa.float64()),
    (r"^(true|false|True|False|TRUE|FALSE)$", pa.bool_()),
)
CSV_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


class CsvRows(Source):
    """The rows of files with the same header: fields with commas, quotes or line breaks in double quotes.

    An empty field is null, and ``""`` is empty text. ``prompt_column`` is text, whatever it looks like.
    """

    def __init__(self, files: Sequence[Path], prompt_column: str) -> None:
        self._files, self._prompt_column = files, prompt_column
        self.options = ["csv", prompt_column]
        # The types that all values of a column so far have, of every column with a value.
        self._types: dict[str, list[int]] = {}

    def tables(self, digests: Sequence[Any] = ()) -> Iterator[tuple[pa.Table, pa.Schema]]:
        """All fields as text: see :class:`specdist.data.formats.converted.Source`. Errors name the row,
        counted from 0 after the header."""
        first: pa.Schema | None = None
        for index, path in enumerate(self._files):
            for table in _text_tables(path, digests[index] if digests else None):
                first = first or table.schema
                check_names(path, table.schema)
                if set(table.column_names) != set(first.names):
                    raise UserError(
                        f"--prompts: {path} has the columns {', '.join(table.column_names)}, but "
                        f"{self._files[0]} has {', '.join(first.names)}; all files must have the same "
                        "columns"
                    )
                table = table.select(first.names)
                for name, column in zip(table.column_names, table.columns, strict=True):
                    self._see(name, column)
                yield table, table.schema

    def finished(self, table: pa.Table) -> pa.Table:
        """Give columns types that hold exactly what all fields say; the others stay text."""
        columns = [
            _cast(column, TYPES[self._types[name][0]][1]) if self._types.get(name) else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        return pa.Table.from_arrays(columns, names=table.column_names)

    def _see(self, name: str, column: pa.ChunkedArray) -> None:
        if name == self._prompt_column or column.null_count == len(column):
            return
        fields = _as_bytes(column)
        self._types[name] = [
            kind for kind in self._types.get(name, range(len(TYPES)))
            if pa.compute.all(pa.compute.match_substring_regex(fields, TYPES[kind][0])).as_py()
        ]  # fmt: skip


def _text_tables(path: Path, digest: Any) -> Iterator[pa.Table]:
    """The file's tables of text columns: at least one, which may be empty."""
    blocks = pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        num_quotes = 0
        with reading(path), open_input(path, digest) as file:
            while block := file.read(READ_BYTES):
                num_quotes += block.count(b'"')
        if num_quotes % 2:
            raise pa.ArrowInvalid("a double quote is not closed; inside a quoted field it is written twice")
        with pa.csv.open_csv(
            pa.input_stream(str(path)), blocks, parsing, pa.csv.ConvertOptions(check_utf8=False)
        ) as header:
            names = header.schema.names
        converting = pa.csv.ConvertOptions(
            column_types=dict(zip(names, repeat(pa.string()))),
            # Invalid text spoils its row, not the file.
            check_utf8=False,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with pa.csv.open_csv(pa.input_stream(str(path)), blocks, parsing, converting) as reader:
            yield reader.schema.empty_table()
            for batch in reader:
                yield pa.Table.from_batches([batch])
    except CSV_ERRORS as error:
        raise UserError(
            f"--prompts {path} cannot be read as CSV: {_describe_error(error)}; every row has as many "
            "fields as the header, fields with commas, quotes or line breaks stand in double quotes, "
            "and the text is UTF-8"
        ) from error


def _describe_error(error: Exception) -> str:
    """pyarrow counts rows from 1, and the header is one."""
    found = re.match(r"CSV parse error: Row #(\d+): (.*)", str(error), re.DOTALL)
    return str(error) if found is None else f"row {int(found[1]) - 2}: {found[2]}"


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    text = [bytes_as_text(chunk) for chunk in _as_bytes(column).chunks]
    return pa.chunked_array(text, pa.string()).cast(kind)


def _as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([text_as_bytes(chunk) for chunk in column.chunks], pa.binary())
