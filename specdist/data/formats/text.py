"""Checking and repairing Arrow columns whose text may not be valid UTF-8.

Not all readers of Arrow check text, but ``datasets`` refuses a whole file for one bad string, so the output
must not hold any.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

BYTES_OF_TEXT = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
TEXT_OF_BYTES = {value: key for key, value in BYTES_OF_TEXT.items()}
# Lists by their own buffers (validity, offsets, sizes), and how their types are made.
LISTS: tuple[tuple[Callable[[pa.DataType], bool], int, Callable[..., pa.DataType]], ...] = (
    (pa.types.is_list, 2, pa.list_),
    (pa.types.is_large_list, 2, pa.large_list),
    (pa.types.is_fixed_size_list, 1, pa.list_),
    (pa.types.is_list_view, 3, pa.list_view),
    (pa.types.is_large_list_view, 3, pa.large_list_view),
)


def is_list(kind: pa.DataType) -> bool:
    """Whether its values are lists, in any layout."""
    return any(test(kind) for test, _, _ in LISTS)


def is_text(kind: pa.DataType) -> bool:
    """Whether its values are text, in any layout, also by a dictionary."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in BYTES_OF_TEXT


def _with_leaves(array: pa.Array, leaf: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """The array with ``leaf`` of each array in it that has no others; JSON whose text becomes bytes is bytes.

    Not by ``view`` of the whole array: pyarrow gives a child of nulls alone the length of the rows.
    """
    kind = array.type
    if isinstance(kind, pa.JsonType):
        storage = _with_leaves(array.storage, leaf)
        return pa.ExtensionArray.from_storage(kind, storage) if storage.type == kind.storage_type else storage
    if pa.types.is_struct(kind) and kind.num_fields:
        children = [_with_leaves(array.field(number), leaf) for number in range(kind.num_fields)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if pa.types.is_dictionary(kind):
        values = _with_leaves(array.dictionary, leaf)
        return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)
    for test, num_buffers, make in LISTS:
        if test(kind):
            items = _with_leaves(array.values, leaf)
            size = (kind.list_size,) if pa.types.is_fixed_size_list(kind) else ()
            changed = make(kind.value_field.with_type(items.type), *size)
            buffers = array.buffers()[:num_buffers]
            return pa.Array.from_buffers(changed, len(array), buffers, offset=array.offset, children=[items])
    return leaf(array)


def bytes_as_text(array: pa.Array) -> pa.Array:
    """The array with its bytes viewed as text, without a check of the UTF-8."""
    return _with_leaves(array, lambda leaf: leaf.view(TEXT_OF_BYTES.get(leaf.type, leaf.type)))


def text_as_bytes(array: pa.Array) -> pa.Array:
    """The array with its text, and that of JSON, viewed as bytes, which may be invalid UTF-8."""
    return _with_leaves(array, lambda leaf: leaf.view(BYTES_OF_TEXT.get(leaf.type, leaf.type)))


def check_layout(column: pa.ChunkedArray) -> None:
    """Check offsets, lengths and indices, but not the UTF-8. Raises ``pa.ArrowInvalid``.

    Arrow trusts the offsets in a file: a damaged one reads outside of its buffer.
    """
    for chunk in column.chunks:
        chunk.validate()
        text_as_bytes(chunk).validate(full=True)


def readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column, or a copy with U+FFFD in place of invalid UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.chunked_array([_with_leaves(chunk, _decoded) for chunk in column.chunks], column.type)
    return column


def _decoded(array: pa.Array) -> pa.Array:
    if array.type not in BYTES_OF_TEXT:
        return array
    found = (None if value is None else value.decode("utf-8", "replace")
             for value in text_as_bytes(array).to_pylist())  # fmt: skip
    return pa.array(found, array.type)


def without_lone_surrogates(text: str) -> str:
    """``text`` with U+FFFD for each unpaired surrogate, which has no UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
