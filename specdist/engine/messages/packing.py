"""Messages between ranks as dataclasses, packed into words of 64 bits by their own field annotations.

A field's annotation says how it is sent:

    slots_R: np.ndarray                       integers
    draft_probabilities_C: FloatArray         float64
    is_hit_R: BoolArray
    features_4C: Annotated[np.ndarray, Packed(np.float64, num_rows=4)]
    times: RoleTimes                          a dataclass, or a dataclass or None; an int

Every array of a message costs both ranks some microseconds between two passes. So the integers of a message
and of its dataclasses are sent as one array, a dataclass of empty arrays or None as one of these integers,
and where each field stands is worked out once for a type. A field declared with :func:`not_sent` keeps its
default at the receiver.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from operator import attrgetter
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
        # Of booleans the values, of floats the bits.
        words: np.ndarray = np.asarray(values, np.int64 if self.in_memory is np.bool_ else self.in_memory)
        return (words.ravel() if self.num_rows else words).view(np.int64)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        values = words.astype(np.bool_) if self.in_memory is np.bool_ else words.view(self.in_memory)
        return values.reshape(self.num_rows, -1) if self.num_rows else values


INTEGERS = Packed(np.int64)
FloatArray = Annotated[np.ndarray, Packed(np.float64)]
BoolArray = Annotated[np.ndarray, Packed(np.bool_)]


def not_sent(default: Any = None) -> Any:
    """A field that is sent by other means, or is known at both ends."""
    return dataclasses.field(default=default, metadata={NOT_SENT: True})


def pack(message: Any) -> list[np.ndarray]:
    """The message's integers, its arrays, and those of its dataclasses that may be missing and are not:
    arrays of integers, which become words of 64 bits where they are put together."""
    message_type: Any = type(message)
    layout = _layout(message_type)
    arrays = list(layout.arrays_of(message))
    for index, packed in layout.converted:
        arrays[index] = packed.pack(arrays[index])
    if not layout.has_numbers:
        return arrays
    numbers = list(layout.numbers_of(message))
    for option in layout.options:
        value = option.of(message)
        is_sent = value is not None and (option.first is None or len(getattr(value, option.first)) > 0)
        numbers.append(is_sent)
        if is_sent:
            arrays += pack(value)
    return [np.array(numbers, np.int64), *arrays]


def unpack(message_type: type[Message], arrays: list[np.ndarray], **known: Any) -> Message:
    """The message of which :func:`pack` made the arrays; ``known``: fields that are not sent. Raises
    ValueError if there are more arrays than it has."""
    message: Message
    message, end = _unpack(message_type, arrays, 0)
    if end < len(arrays):
        raise ValueError(f"the message has more parts than {message_type.__name__}")
    message.__dict__.update(known)
    return message


def _unpack(message_type: Any, arrays: Sequence[np.ndarray], begin: int) -> tuple[Any, int]:
    """The message whose arrays begin there, and where they end."""
    layout = _layout(message_type)
    numbers = arrays[begin].tolist() if layout.has_numbers else []
    begin += layout.has_numbers
    end = begin + layout.num_arrays
    message = layout.whole.build(numbers, arrays[begin:end])
    for option, is_sent in zip(layout.options, numbers[layout.num_numbers :], strict=True):
        value, end = _unpack(option.type, arrays, end) if is_sent else (option.otherwise, end)
        option.owner_of(message).__dict__[option.name] = value
    return message, end


@dataclasses.dataclass(frozen=True)
class _Part:
    """The message, or a dataclass in it that is always sent: its own integers and arrays, and where they
    stand among all."""

    type: Any
    number_names: list[str]
    numbers: slice
    array_names: list[str]
    arrays: slice
    converted: list[tuple[str, Packed]]
    parts: list[tuple[str, _Part]]

    def build(self, numbers: list[int], arrays: Sequence[np.ndarray]) -> Any:
        # Not its __init__, which sets one field after the other; those that are not sent are the class's.
        message = object.__new__(self.type)
        fields = message.__dict__
        fields.update(zip(self.number_names, numbers[self.numbers], strict=True))
        fields.update(zip(self.array_names, arrays[self.arrays], strict=True))
        for name, packed in self.converted:
            fields[name] = packed.unpack(fields[name])
        for name, part in self.parts:
            fields[name] = part.build(numbers, arrays)
        return message


@dataclasses.dataclass(frozen=True)
class _Option:
    """A dataclass that is not sent where it is None, or where its ``first`` array, and so all of them, are
    empty; the receiver then has ``otherwise``."""

    type: Any
    name: str
    owner_of: Callable[[Any], Any]
    of: Callable[[Any], Any]
    first: str | None
    otherwise: Any


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Of a message: its integers and its arrays, of which those of other types are ``converted``. A number
    for each of the options follows the integers."""

    whole: _Part
    numbers_of: Callable[[Any], Sequence[int]]
    num_numbers: int
    arrays_of: Callable[[Any], Sequence[np.ndarray]]
    num_arrays: int
    converted: list[tuple[int, Packed]]
    options: list[_Option]
    has_numbers: bool


@functools.cache
def _layout(message_type: Any) -> _Layout:
    numbers: list[str] = []
    arrays: list[tuple[str, Packed]] = []
    options: list[_Option] = []
    whole = _part(message_type, "", numbers, arrays, options)
    return _Layout(
        whole=whole,
        numbers_of=_values_at(numbers),
        num_numbers=len(numbers),
        arrays_of=_values_at([path for path, _ in arrays]),
        num_arrays=len(arrays),
        converted=[(index, packed) for index, (_, packed) in enumerate(arrays) if packed != INTEGERS],
        options=options,
        has_numbers=bool(numbers or options),
    )


def _part(
    message_type: Any, path: str, numbers: list[str], arrays: list[tuple[str, Packed]], options: list[_Option]
) -> _Part:
    """Of the dataclass at this path, whose fields are added to those of the whole message."""
    hints = _hints(message_type)
    own_numbers = [name for name, hint in hints.items() if hint is int]
    own_arrays = [(name, packed) for name, hint in hints.items() if (packed := _packed(hint)) is not None]
    first_number, first_array = len(numbers), len(arrays)
    numbers += [path + name for name in own_numbers]
    arrays += [(path + name, packed) for name, packed in own_arrays]
    slices = slice(first_number, len(numbers)), slice(first_array, len(arrays))
    parts = []
    for name, hint in hints.items():
        if hint is int or _packed(hint) is not None:
            continue
        nested: Any = next(each for each in get_args(hint) or (hint,) if dataclasses.is_dataclass(each))
        first, otherwise = None, None
        if type(None) not in get_args(hint):
            if not all(_packed(each) is not None for each in _hints(nested).values()):
                parts.append((name, _part(nested, f"{path}{name}.", numbers, arrays, options)))
                continue
            first, of_nested = next(iter(_hints(nested))), _layout(nested)
            otherwise = of_nested.whole.build([], [np.zeros(0, np.int64)] * of_nested.num_arrays)
        owner_of = attrgetter(path[:-1]) if path else lambda message: message
        options.append(_Option(nested, name, owner_of, attrgetter(path + name), first, otherwise))
    converted = [(name, packed) for name, packed in own_arrays if packed != INTEGERS]
    return _Part(
        message_type, own_numbers, slices[0], [name for name, _ in own_arrays], slices[1], converted, parts
    )


def _hints(message_type: Any) -> dict[str, Any]:
    """Of the fields that are sent."""
    hints = typing.get_type_hints(message_type, include_extras=True)
    sent = [field.name for field in dataclasses.fields(message_type) if NOT_SENT not in field.metadata]
    return {name: hints[name] for name in sent}


def _packed(hint: Any) -> Packed | None:
    """How an array is sent; None of what is none."""
    if get_origin(hint) is Annotated:
        packed: Packed = get_args(hint)[1]
        return packed
    options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return INTEGERS if np.ndarray in options else None


def _values_at(paths: list[str]) -> Callable[[Any], Sequence[Any]]:
    """Of a message, the values at these paths."""
    if len(paths) > 1:
        return attrgetter(*paths)
    get_each = [attrgetter(path) for path in paths]
    return lambda message: [get(message) for get in get_each]
