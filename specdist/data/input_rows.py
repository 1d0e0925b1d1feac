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

from specdist.data.text import check_layout

# Decoded row groups that are kept: rows are read in order, by their shard and one by one.
MAX_GROUPS = 3


class InputRows(ABC):
    """``ends``: the row after the last one of each file, if rows are read when they are needed; None if all
    are in memory."""

    num_rows: int
    schema: pa.Schema
    ends: tuple[int, ...] | None

    @abstractmethod
    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows ``start`` to ``stop - 1``. Raises ``pa.ArrowException`` or OSError for a damaged file."""

    def value(self, column: str, row: int) -> Any:
        """Raises as :meth:`read` does, and UnicodeDecodeError."""
        return self.read(row, row + 1, [column]).column(0)[0].as_py()

    @abstractmethod
    def values(self, column: str) -> Iterator[Any]:
        """Of all rows."""

    @abstractmethod
    def limited(self, num_rows: int) -> InputRows:
        """The first rows."""


class TableRows(InputRows):
    """Of a table."""

    def __init__(self, table: pa.Table, ends: tuple[int, ...] | None = None) -> None:
        self._table = table
        self.num_rows, self.schema, self.ends = table.num_rows, table.schema, ends

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        table = self._table if columns is None else self._table.select(columns)
        return table.slice(start, stop - start)

    def values(self, column: str) -> Iterator[Any]:
        yield from self._table.column(column).to_pylist()

    def limited(self, num_rows: int) -> InputRows:
        return TableRows(self._table.slice(0, num_rows), self.ends)


class ParquetRows(InputRows):
    """Of Parquet files with the same columns: a few decoded row groups are in memory at a time."""

    def __init__(self, files: Sequence[Path], metadata: Sequence[pa.parquet.FileMetaData]) -> None:
        self._files, self._metadata = files, metadata
        self.schema = metadata[0].schema.to_arrow_schema()
        self.ends = tuple(accumulate(found.num_rows for found in metadata))
        self.num_rows = self.ends[-1]
        # Of every row group: its file, its number there, and the row after its last.
        self._groups = [
            (index, group) for index, found in enumerate(metadata) for group in range(found.num_row_groups)
        ]
        sizes = (metadata[index].row_group(group).num_rows for index, group in self._groups)
        self._ends = list(accumulate(sizes))
        self._decoded: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        names = tuple(self.schema.names if columns is None else columns)
        pieces = [self.schema.empty_table().select(names)]
        for number in range(bisect_right(self._ends, start), len(self._groups)):
            first = self._ends[number - 1] if number else 0
            if first >= stop:
                break
            low = max(start - first, 0)
            pieces.append(self._decode(number, names).slice(low, stop - first - low))
        return pa.concat_tables(pieces)

    def values(self, column: str) -> Iterator[Any]:
        for first in range(0, self.num_rows, 2**16):
            yield from self.read(first, min(first + 2**16, self.num_rows), [column]).column(0).to_pylist()

    def limited(self, num_rows: int) -> InputRows:
        rows = ParquetRows(self._files, self._metadata)
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
        for column in self._decode(number, tuple(self.schema.names)).columns:
            check_layout(column)

    def _decode(self, number: int, names: tuple[str, ...]) -> pa.Table:
        key = number, names
        if key not in self._decoded:
            index, group = self._groups[number]
            with pa.parquet.ParquetFile(
                self._files[index], metadata=self._metadata[index], memory_map=True
            ) as file:
                self._decoded[key] = file.read_row_group(group, columns=list(names)).select(names)
            if len(self._decoded) > MAX_GROUPS:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(key)
        return self._decoded[key]
