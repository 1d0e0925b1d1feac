"""Checking and repairing Arrow columns whose text may not be valid UTF-8.

Not all readers of Arrow check text, but ``datasets`` refuses a whole file for one bad string, so the output
must not hold any.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

BYTES_OF_TEXT = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
TEXT_OF_BYTES = {value: key for key, value in BYTES_OF_TEXT.items()}


def _with_leaves(type_: pa.DataType, leaves: dict[pa.DataType, pa.DataType]) -> pa.DataType:
    """``type_`` with its leaf types replaced by others of the same memory layout."""
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_with_leaves(field.type, leaves)) for field in type_])
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        make = pa.list_ if pa.types.is_list(type_) else pa.large_list
        return make(type_.value_field.with_type(_with_leaves(type_.value_type, leaves)))
    if pa.types.is_dictionary(type_):
        return pa.dictionary(type_.index_type, _with_leaves(type_.value_type, leaves), type_.ordered)
    return leaves.get(type_, type_)


def _viewed(array: pa.Array, leaves: dict[pa.DataType, pa.DataType]) -> pa.Array:
    type_ = _with_leaves(array.type, leaves)
    return array if type_ == array.type else array.view(type_)


def bytes_as_text(array: pa.Array) -> pa.Array:
    """The array with its bytes viewed as text, without a check of the UTF-8."""
    return _viewed(array, TEXT_OF_BYTES)


def text_as_bytes(array: pa.Array) -> pa.Array:
    """The array with its text viewed as bytes, which may be invalid UTF-8."""
    return _viewed(array, BYTES_OF_TEXT)


def check_layout(column: pa.ChunkedArray) -> None:
    """Check offsets, lengths and indices, but not the UTF-8. Raises ``pa.ArrowInvalid``.

    Arrow trusts the offsets in a file: a damaged one reads outside of its buffer.
    """
    for chunk in column.chunks:
        _viewed(chunk, BYTES_OF_TEXT).validate(full=True)


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column, or a copy with U+FFFD in place of invalid UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        values = [
            _decoded(value, column.type)
            for chunk in column.chunks
            for value in _viewed(chunk, BYTES_OF_TEXT).to_pylist()
        ]
        return pa.chunked_array([pa.array(values, column.type)])
    return column


def _decoded(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {field.name: _decoded(value[field.name], field.type) for field in type_}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [_decoded(item, type_.value_type) for item in value]
    if pa.types.is_dictionary(type_):
        return _decoded(value, type_.value_type)
    return value.decode("utf-8", "replace") if type_ in BYTES_OF_TEXT else value


def without_lone_surrogates(text: str) -> str:
    """``text`` with U+FFFD for each unpaired surrogate, which has no UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
