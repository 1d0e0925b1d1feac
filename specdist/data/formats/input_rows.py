"""The rows of the input: a table in memory or memory-mapped, or Parquet files read a row group at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from specdist.data.formats.columns import conformed
from specdist.data.formats.json_columns import empty_table, values_of

# Decoded row groups that are kept, one for each choice of columns: a shard's, the prompt, its tools, its
# constraint and its options, of rows that are read in order.
MAX_GROUPS = 5
ROWS_PER_READ = 2**16


class InputRows(ABC):
    """``ends``: the row after the last one of each file, if rows are read when they are needed; None if all
    are in memory."""

    num_rows: int
    schema: pa.Schema
    ends: tuple[int, ...] | None

    @abstractmethod
    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows ``start`` to ``stop - 1``. Raises ``pa.ArrowException`` or OSError for a damaged file."""

    def row(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """These columns of a row, without fields of structs that are null: see :func:`values_of`. Raises as
        :meth:`read` does, and :class:`JsonError`."""
        found = self.read(row, row + 1, columns)
        return {name: values_of(found.column(name), drops_absent=True)[0] for name in columns}

    def values(self, column: str) -> Iterator[Any]:
        """The column's values in all rows, as :meth:`row` gives them."""
        for first in range(0, self.num_rows, ROWS_PER_READ):
            found = self.read(first, min(first + ROWS_PER_READ, self.num_rows), [column])
            yield from values_of(found.column(0), drops_absent=True)

    @abstractmethod
    def limited(self, num_rows: int) -> InputRows:
        """The first rows."""


class TableRows(InputRows):
    """The rows of a table."""

    def __init__(self, table: pa.Table, ends: tuple[int, ...] | None = None) -> None:
        self._table = table
        self.num_rows, self.schema, self.ends = table.num_rows, table.schema, ends

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        table = self._table if columns is None else self._table.select(columns)
        return table.slice(start, stop - start)

    def limited(self, num_rows: int) -> InputRows:
        return TableRows(self._table.slice(0, num_rows), self.ends)


class ParquetRows(InputRows):
    """The rows of Parquet files with the same columns: a few decoded row groups are in memory at a time."""

    def __init__(
        self, files: Sequence[Path], metadata: Sequence[pa.parquet.FileMetaData], schema: pa.Schema
    ) -> None:
        self._files, self._metadata, self.schema = files, metadata, schema
        self.ends = tuple(accumulate(found.num_rows for found in metadata))
        self.num_rows = self.ends[-1]
        # Each row group's file, number there, and the row after its last.
        self._groups = [
            (index, group) for index, found in enumerate(metadata) for group in range(found.num_row_groups)
        ]
        sizes = (metadata[index].row_group(group).num_rows for index, group in self._groups)
        self._ends = list(accumulate(sizes))
        self._decoded: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        names = tuple(self.schema.names if columns is None else columns)
        pieces = [empty_table(pa.schema(map(self.schema.field, names)))]
        for number in range(bisect_right(self._ends, start), len(self._groups)):
            first = self._ends[number - 1] if number else 0
            if first >= stop:
                break
            low = max(start - first, 0)
            pieces.append(self._decode(number, names).slice(low, stop - first - low))
        return pa.concat_tables(pieces)

    def limited(self, num_rows: int) -> InputRows:
        rows = ParquetRows(self._files, self._metadata, self.schema)
        rows.num_rows = min(num_rows, self.num_rows)
        return rows

    @property
    def num_groups(self) -> int:
        """Row groups of all files."""
        return len(self._groups)

    def file_of(self, number: int) -> Path:
        """The file of a row group."""
        return self._files[self._groups[number][0]]

    def check(self, number: int) -> None:
        """Decode a row group. Raises as :meth:`read` does."""
        self._decode(number, tuple(self.schema.names)).validate(full=True)

    def _decode(self, number: int, names: tuple[str, ...]) -> pa.Table:
        key = number, names
        if key not in self._decoded:
            index, group = self._groups[number]
            with pa.parquet.ParquetFile(
                self._files[index], metadata=self._metadata[index], memory_map=True
            ) as file:
                found = file.read_row_group(group, columns=list(names))
            self._decoded[key] = conformed(found, pa.schema(map(self.schema.field, names)))
            if len(self._decoded) > MAX_GROUPS:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(key)
        return self._decoded[key]
