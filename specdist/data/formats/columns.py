"""The columns of one file and of several: no name twice, and the same names and types in any order; and
which types are lists and text, in any of Arrow's layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from specdist.utils.errors import UserError

TEXTS = (pa.string(), pa.large_string(), pa.string_view())
LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def is_list(kind: pa.DataType) -> bool:
    """Whether its values are lists."""
    return any(test(kind) for test in LISTS)


def is_text(kind: pa.DataType) -> bool:
    """Whether its values are text, also by a dictionary."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in TEXTS


def check_names(path: Path, schema: pa.Schema) -> None:
    """Raises :class:`UserError` for columns, or fields of a struct, of one name."""
    twice = dict.fromkeys(_twice(schema))
    if twice:
        raise UserError(f"--prompts {path} has more than one column named {', '.join(twice)}: rename them")


def _twice(fields: Iterable[pa.Field], place: str = "") -> Iterator[str]:
    fields = list(fields)
    counts = Counter(field.name for field in fields)
    for field in fields:
        name, kind = f"{place}{field.name}", field.type
        if counts[field.name] > 1:
            yield name
        yield from _twice((kind.field(number) for number in range(kind.num_fields)), f"{name}.")


def common_schema(files: Sequence[Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema of the first file, which :func:`conformed` gives the others. Raises :class:`UserError` for a
    name that one of them has twice, or other columns, or types that differ in more than the order of keys."""
    first = schemas[0]
    for path, schema in zip(files, schemas, strict=True):
        check_names(path, schema)
        kinds, others = ({field.name: field.type for field in each} for each in (first, schema))
        for name in {**kinds, **others}:
            if name not in kinds or name not in others or not _is_same(kinds[name], others[name]):
                has, had = (f"{name} ({each[name]})" if name in each else f"no column {name}"
                            for each in (others, kinds))  # fmt: skip
                raise UserError(
                    f"--prompts: {path} has {has}, but {files[0]} has {had}; all files must have the same "
                    "columns and types"
                )
        if any(field.nullable != first.field(field.name).nullable for field in schema):
            first = pa.schema([field.with_nullable(True) for field in first], first.metadata)
    return first


def _is_same(first: pa.DataType, other: pa.DataType) -> bool:
    """Whether they differ in the order of structs' keys at most."""
    if pa.types.is_struct(first) and pa.types.is_struct(other):
        fields, others = ({field.name: field for field in kind} for kind in (first, other))
    elif first.id == other.id and (pa.types.is_list(first) or pa.types.is_large_list(first)):
        fields, others = {"": first.value_field}, {"": other.value_field}
    else:
        return bool(first == other)
    return fields.keys() == others.keys() and all(
        field.nullable == others[name].nullable and _is_same(field.type, others[name].type)
        for name, field in fields.items()
    )


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """These columns of a table of a file that has them in another order."""
    columns = [(table.column(field.name), field.type) for field in schema]
    cast = [column if column.type == kind else column.cast(kind) for column, kind in columns]
    return pa.Table.from_arrays(cast, schema=schema)
