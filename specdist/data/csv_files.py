"""CSV files to an Arrow table.

pyarrow guesses a column's type from the beginning of the file, makes dates of what looks like one, and 7 of
``007``. So every field is read as text here, and a column becomes one of numbers or truth values only where
each of its fields is that value's usual form.
"""

from __future__ import annotations

import re
from itertools import repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from specdist.data.text import bytes_as_text, text_as_bytes
from specdist.utils.errors import UserError

# A row must fit into a block.
BLOCK_BYTES = 2**26
# All fields of a column: its type. More digits than 64 bits hold would be lost.
TYPES = (
    (r"^-?(0|[1-9][0-9]{0,17})$", pa.int64()),
    (r"^-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][+-]?[0-9]+)?$", pa.float64()),
    (r"^(true|false|True|False|TRUE|FALSE)$", pa.bool_()),
)
CSV_ERRORS = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError)


def read_csv(files: list[Path], prompt_column: str) -> pa.Table:
    """The rows of files with the same header: fields with commas, quotes or line breaks in double quotes.

    An empty field is null, and ``""`` is empty text. ``prompt_column`` is text, whatever it looks like.
    Raises :class:`UserError` with the file, and the row, counted from 0 after the header.
    """
    tables = [_read(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.column_names != tables[0].column_names:
            raise UserError(
                f"--prompts: {file} has the columns {', '.join(table.column_names)}, but {files[0]} has "
                f"{', '.join(tables[0].column_names)}; all files must have the same columns, in this order"
            )
    found = pa.concat_tables(tables)
    columns = [
        column if name == prompt_column else _typed(column)
        for name, column in zip(found.column_names, found.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=found.column_names)


def _read(path: Path) -> pa.Table:
    reading = pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        num_quotes = 0
        with pa.input_stream(str(path)) as file:
            while block := file.read(2**20):
                num_quotes += block.count(b'"')
        if num_quotes % 2:
            raise pa.ArrowInvalid("a double quote is not closed; inside a quoted field it is written twice")
        with pa.csv.open_csv(
            pa.input_stream(str(path)), reading, parsing, pa.csv.ConvertOptions(check_utf8=False)
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
        return pa.csv.read_csv(pa.input_stream(str(path)), reading, parsing, converting)
    except CSV_ERRORS as error:
        raise UserError(
            f"--prompts {path} is not a complete CSV file (damaged or truncated?): {_told(error)}"
        ) from error


def _told(error: Exception) -> str:
    """pyarrow counts rows from 1, and the header is one."""
    found = re.match(r"CSV parse error: Row #(\d+): (.*)", str(error), re.DOTALL)
    return str(error) if found is None else f"row {int(found[1]) - 2}: {found[2]}"


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """As a type that holds exactly what the fields say; else as text."""
    if column.null_count == len(column):
        return column
    as_bytes = pa.chunked_array([text_as_bytes(chunk) for chunk in column.chunks], pa.binary())
    for pattern, kind in TYPES:
        if pa.compute.all(pa.compute.match_substring_regex(as_bytes, pattern)).as_py():
            text = pa.chunked_array([bytes_as_text(chunk) for chunk in as_bytes.chunks], pa.string())
            return text.cast(kind)
    return column
