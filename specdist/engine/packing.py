"""Messages between ranks as dataclasses, packed into int32 arrays by their own field annotations.

A field's annotation says how it is sent:

    slots_R: np.ndarray                       integers: int32 on the wire, int64 in memory
    stream_keys: Int64Array                   integers that need 64 bits
    draft_probabilities_C: Float32Array       float32 on the wire, float64 in memory
    is_hit_R: BoolArray
    features_4C: Annotated[np.ndarray, Packed(np.float32, np.float64, num_rows=4)]
    times: RoleTimes                          a dataclass, or a dataclass or None; an int

A field declared with :func:`not_sent` keeps its default at the receiver.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin

import numpy as np

Message = TypeVar("Message")
NOT_SENT = "not_sent"


@dataclasses.dataclass(frozen=True)
class Packed:
    """An array's type on the wire and in memory; with ``num_rows`` it is a matrix, sent flattened."""

    on_wire: type
    in_memory: type
    num_rows: int = 0

    def pack(self, values: Any) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(values).astype(self.on_wire).ravel()).view(np.int32)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        values: np.ndarray = np.ascontiguousarray(words, np.int32).view(self.on_wire).astype(self.in_memory)
        return values.reshape(self.num_rows, -1) if self.num_rows else values


INTEGERS, WIDE_INTEGERS = Packed(np.int32, np.int64), Packed(np.int64, np.int64)
Int64Array = Annotated[np.ndarray, WIDE_INTEGERS]
Float32Array = Annotated[np.ndarray, Packed(np.float32, np.float64)]
BoolArray = Annotated[np.ndarray, Packed(np.int32, np.bool_)]


def not_sent(default: Any = None) -> Any:
    """A field that is sent by other means, or is known at both ends."""
    return dataclasses.field(default=default, metadata={NOT_SENT: True})


def pack(message: Any) -> list[np.ndarray]:
    """int32 arrays, field by field."""
    arrays: list[np.ndarray] = []
    message_type: Any = type(message)
    for name, field in _layout(message_type):
        field.pack(getattr(message, name), arrays.append)
    return arrays


def unpack(message_type: type[Message], arrays: list[np.ndarray]) -> Message:
    """The message of which :func:`pack` made the arrays. Raises ValueError if there are more than it has."""
    remaining = iter(arrays)
    message: Message = _unpack(message_type, remaining)
    if next(remaining, None) is not None:
        raise ValueError(f"the message has more parts than {message_type.__name__}")
    return message


def _unpack(message_type: Any, arrays: Iterator[np.ndarray]) -> Any:
    return message_type(**{name: field.unpack(arrays) for name, field in _layout(message_type)})


@dataclasses.dataclass(frozen=True)
class _Field:
    pack: Callable[[Any, Callable[[np.ndarray], None]], None]
    unpack: Callable[[Iterator[np.ndarray]], Any]


@functools.cache
def _layout(message_type: Any) -> tuple[tuple[str, _Field], ...]:
    hints = typing.get_type_hints(message_type, include_extras=True)
    sent = [field for field in dataclasses.fields(message_type) if NOT_SENT not in field.metadata]
    return tuple((field.name, _field_of(hints[field.name])) for field in sent)


def _field_of(hint: Any) -> _Field:
    if get_origin(hint) is Annotated:
        return _array_field(get_args(hint)[1])
    options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if np.ndarray in options:
        return _array_field(INTEGERS)
    if hint is int:
        return _Field(
            lambda value, add: add(WIDE_INTEGERS.pack([value])),
            lambda arrays: int(WIDE_INTEGERS.unpack(next(arrays))[0]),
        )
    nested: Any = next(option for option in options if dataclasses.is_dataclass(option))
    if type(None) in options:
        return _optional_field(nested)
    return _Field(lambda value, add: _each(pack(value), add), lambda arrays: _unpack(nested, arrays))


def _array_field(packed: Packed) -> _Field:
    return _Field(lambda value, add: add(packed.pack(value)), lambda arrays: packed.unpack(next(arrays)))


def _optional_field(nested: Any) -> _Field:
    """Sent as an array of one 1 and the contents, or as an array of one 0."""

    def write(value: Any, add: Callable[[np.ndarray], None]) -> None:
        add(np.array([value is not None], np.int32))
        if value is not None:
            _each(pack(value), add)

    return _Field(write, lambda arrays: _unpack(nested, arrays) if next(arrays)[0] else None)


def _each(arrays: list[np.ndarray], add: Callable[[np.ndarray], None]) -> None:
    for array in arrays:
        add(array)
