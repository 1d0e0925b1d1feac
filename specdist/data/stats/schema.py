"""All columns, statistics and totals of a run, with types and meanings, as they are declared.

``jobs/show.py --schema``, the README and the card in every run's folder print it, with the types of what is
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import pyarrow as pa

from specdist.data.columns import Column, every_column
from specdist.data.stats.shard import FIGURES, Stats
from specdist.data.stats.traces import TRACE_COLUMNS
from specdist.utils.markdown import code, plain, table

# Fields of a run, beside :data:`FIGURES`.
BEFORE_FIGURES = {
    "output": ("string", "the run folder"),
    "exact": ("bool", "the completions follow the target's own distribution"),
    "complete": ("bool", "all shards are finished"),
}
ARROW_TYPES = {"double": "float64", "float": "float32"}
JSON_TYPES = {int: "int", list[int]: "list of int"}


@dataclass(frozen=True)
class Field:
    """A column, or a value in a JSON document by its dotted name."""

    name: str
    type: str
    meaning: str


def columns_of(columns: Mapping[str, Column]) -> list[Field]:
    return [Field(name, _arrow_type(column.type), column.meaning) for name, column in columns.items()]


def statistics_fields() -> list[Field]:
    """The values in ``stats/*.json``."""
    replica = Field("replica", "string", "the replica that finished the shard")
    return [Field("exact", *BEFORE_FIGURES["exact"]), replica, *_statistics(Stats)]


def totals_fields() -> list[Field]:
    """The values in the last line that a run prints, which are ``load_run(...).statistics``."""
    empty = Stats().summary()
    figures = {name: (_value_type(empty[name]), meaning) for name, (meaning, _) in FIGURES.items()}
    return [Field(name, *each) for name, each in (BEFORE_FIGURES | figures).items()]


SECTIONS = {
    "columns": ("column", lambda: columns_of(every_column())),
    "trace": ("column of the trace", lambda: columns_of(TRACE_COLUMNS)),
    "statistics": ("statistic", statistics_fields),
    "totals": ("total", totals_fields),
}


def column_fields(schema: pa.Schema, other_meaning: str) -> list[Field]:
    """The columns of a shard's file, in order; ``other_meaning`` describes those of the input."""
    meanings = {name: column.meaning for name, column in every_column().items()}
    return [
        Field(each.name, _arrow_type(each.type), meanings.get(each.name, other_meaning)) for each in schema
    ]


def fields_table(heading: str, fields: Iterable[Field]) -> str:
    """A Markdown table with ``heading`` over its first column."""
    rows = [[code(field.name), plain(field.type), field.meaning.replace("|", "\\|")] for field in fields]
    return table([heading, "type", "meaning"], rows)


def _arrow_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list<{_arrow_type(type_.value_type)}>"
    return ARROW_TYPES.get(str(type_), str(type_))


def _statistics(of: Any) -> Iterator[Field]:
    """Dotted names of a dataclass's values; the fields of one that has a meaning of its own are not told."""
    hints = get_type_hints(of)
    for item in dataclasses.fields(of):
        hint, meaning = hints[item.name], item.metadata["meaning"]
        if not dataclasses.is_dataclass(hint):
            yield Field(item.name, JSON_TYPES[hint], meaning)
        elif meaning:
            yield Field(item.name, "object", meaning)
        else:
            for each in _statistics(hint):
                yield dataclasses.replace(each, name=f"{item.name}.{each.name}")


def _value_type(value: Any) -> str:
    """The type of a figure, by its value in an empty run, where every ratio is None."""
    if isinstance(value, dict):
        return "object"
    return "float or null" if value is None else type(value).__name__
