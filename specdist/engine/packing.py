"""Messages between ranks as dataclasses, packed into words of 64 bits by their own field annotations.

A field's annotation says how it is sent:

    slots_R: np.ndarray                       integers
    draft_probabilities_C: FloatArray         float64
    is_hit_R: BoolArray
    features_4C: Annotated[np.ndarray, Packed(np.float64, num_rows=4)]
    times: RoleTimes                          a dataclass, or a dataclass or None; an int

Every array of a message costs both ranks some microseconds between two passes, so a dataclass's integers are
sent as one, and words of 64 bits need no conversion at either end. A field declared with :func:`not_sent`
keeps its default at the receiver.
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
# A default that, unlike a function, does not become a method of a message that was received.
NOTHING_TO_DO = functools.partial(lambda: None)


@dataclasses.dataclass(frozen=True)
class Packed:
    """An array's type in memory; with ``num_rows`` it is a matrix, sent flattened."""

    in_memory: type
    num_rows: int = 0

    def pack(self, values: Any) -> np.ndarray:
        # Of booleans and narrower integers the values, of floats the bits.
        words: np.ndarray = np.asarray(values, np.int64 if self.in_memory is np.bool_ else self.in_memory)
        return (words.ravel() if self.num_rows else words).view(np.int64)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        values = words.astype(np.bool_) if self.in_memory is np.bool_ else words.view(self.in_memory)
        return values.reshape(self.num_rows, -1) if self.num_rows else values


INTEGERS = Packed(np.int64)
_NO_WORDS, _ONE_WORD = np.zeros(0, np.int64), np.ones(1, np.int64)
FloatArray = Annotated[np.ndarray, Packed(np.float64)]
BoolArray = Annotated[np.ndarray, Packed(np.bool_)]


def not_sent(default: Any = None) -> Any:
    """A field that is sent by other means, or is known at both ends."""
    return dataclasses.field(default=default, metadata={NOT_SENT: True})


def pack(message: Any) -> list[np.ndarray]:
    """int64 arrays: the message's own integers, then field by field."""
    arrays: list[np.ndarray] = []
    _pack(message, arrays.append)
    return arrays


def unpack(message_type: type[Message], arrays: list[np.ndarray], **known: Any) -> Message:
    """The message of which :func:`pack` made the arrays; ``known``: fields that are not sent. Raises
    ValueError if there are more arrays than it has."""
    remaining = iter(arrays)
    message: Message = _unpack(message_type, remaining)
    if next(remaining, None) is not None:
        raise ValueError(f"the message has more parts than {message_type.__name__}")
    message.__dict__.update(known)
    return message


def _pack(message: Any, add: Callable[[np.ndarray], None]) -> None:
    message_type: Any = type(message)
    layout = _layout(message_type)
    if layout.numbers:
        add(np.array([getattr(message, name) for name in layout.numbers], np.int64))
    for name, field in layout.fields:
        field.pack(getattr(message, name), add)


def _unpack(message_type: Any, arrays: Iterator[np.ndarray]) -> Any:
    layout = _layout(message_type)
    numbers = next(arrays).tolist() if layout.numbers else ()
    values = dict(zip(layout.numbers, numbers, strict=True))
    for name, field in layout.fields:
        values[name] = field.unpack(arrays)
    # Not its __init__, which sets one field after the other; those that are not sent are the class's.
    message = object.__new__(message_type)
    message.__dict__.update(values)
    return message


@dataclasses.dataclass(frozen=True)
class _Field:
    pack: Callable[[Any, Callable[[np.ndarray], None]], None]
    unpack: Callable[[Iterator[np.ndarray]], Any]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The names of a dataclass's integers, and its other fields."""

    numbers: tuple[str, ...]
    fields: tuple[tuple[str, _Field], ...]


@functools.cache
def _layout(message_type: Any) -> _Layout:
    hints = typing.get_type_hints(message_type, include_extras=True)
    sent = [field.name for field in dataclasses.fields(message_type) if NOT_SENT not in field.metadata]
    return _Layout(
        tuple(name for name in sent if hints[name] is int),
        tuple((name, _field_of(hints[name])) for name in sent if hints[name] is not int),
    )


def _field_of(hint: Any) -> _Field:
    if get_origin(hint) is Annotated:
        return _array_field(get_args(hint)[1])
    options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if np.ndarray in options:
        return _array_field(INTEGERS)
    nested: Any = next(option for option in options if dataclasses.is_dataclass(option))
    if type(None) in options:
        return _optional_field(nested)
    layout = _layout(nested)
    if layout.numbers or not all(isinstance(field, _ArrayField) for _, field in layout.fields):
        return _Field(_pack, lambda arrays: _unpack(nested, arrays))
    return _columns_field(nested)


class _ArrayField(_Field):
    """An array."""


def _array_field(packed: Packed) -> _Field:
    return _ArrayField(lambda value, add: add(packed.pack(value)), lambda arrays: packed.unpack(next(arrays)))


def _columns_field(nested: Any) -> _Field:
    """A dataclass of arrays alone, all of which are empty where the first is. Such a one, as in most rounds,
    is sent as one empty array."""
    fields = _layout(nested).fields
    first, _ = fields[0]
    empty = _unpack(nested, iter([_NO_WORDS] * len(fields)))

    def write(value: Any, add: Callable[[np.ndarray], None]) -> None:
        if len(getattr(value, first)):
            add(_ONE_WORD)
            _pack(value, add)
        else:
            add(_NO_WORDS)

    return _Field(write, lambda arrays: _unpack(nested, arrays) if len(next(arrays)) else empty)


def _optional_field(nested: Any) -> _Field:
    """Sent as an array of one 1 and the contents, or as an array of one 0."""

    def write(value: Any, add: Callable[[np.ndarray], None]) -> None:
        add(np.array([value is not None], np.int64))
        if value is not None:
            _pack(value, add)

    return _Field(write, lambda arrays: _unpack(nested, arrays) if next(arrays)[0] else None)
