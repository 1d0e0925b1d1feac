"""CSV files to an Arrow table.

pyarrow guesses a column's type from the beginning of the file, makes dates of what looks like one, and 7 of
``007``. So every field is read as text here, and a column becomes one of numbers or truth values only where
each of its fields is that value's usual form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from specdist.data.formats.columns import common_schema, conformed
from specdist.data.formats.streams import READ_BYTES, open_input, reading
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


def read_csv(files: Sequence[Path], prompt_column: str) -> pa.Table:
    """The rows of files with the same header: fields with commas, quotes or line breaks in double quotes.

    An empty field is null, and ``""`` is empty text. ``prompt_column`` is text, whatever it looks like.
    Raises :class:`UserError` with the file and the row, counted from 0 after the header.
    """
    tables = [_text_table(path) for path in files]
    schema = common_schema(files, [table.schema for table in tables])
    whole = pa.concat_tables([conformed(table, schema) for table in tables])
    columns = [
        column if name == prompt_column else _typed(column)
        for name, column in zip(whole.column_names, whole.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=whole.column_names)


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in a type that holds exactly what all fields say; else it stays text."""
    if column.null_count < len(column):
        for pattern, kind in TYPES:
            if pa.compute.all(pa.compute.match_substring_regex(column, pattern)).as_py():
                return column.cast(kind)
    return column


def _text_table(path: Path) -> pa.Table:
    """The file's table of text columns."""
    blocks = pa.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        num_quotes = 0
        with reading(path), open_input(path) as file:
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
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with pa.csv.open_csv(pa.input_stream(str(path)), blocks, parsing, converting) as reader:
            return reader.read_all()
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
