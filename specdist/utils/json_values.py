"""JSON that may be damaged: whatever is wrong with it is a ValueError, before anybody relies on a value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Parsed = TypeVar("Parsed")
Reader = Callable[[Any, str], Any]
MAX_SHOWN_CHARACTERS = 60
# What a value is of in JSON, and what a message calls it. A whole number is a number; true is neither.
PLAIN_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a valid integer"),
    float: ((int, float), "a valid number"),
    str: ((str,), "a valid string"),
    bool: ((bool,), "a valid boolean"),
}


def parse_json(content: bytes) -> Any:
    """The document in a file's bytes. Raises ValueError for what is not JSON, whatever is wrong with it."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse as :func:`parse_json` a document that has to be an object."""
    values = parse_json(content)
    if not isinstance(values, dict):
        raise ValueError(f"it holds {_shown(values)}, not an object")
    return values


def from_fields(cls: type[Parsed], values: Any, *, drops_unknown: bool = False) -> Parsed:
    """The dataclass ``cls``, nested ones included, from an object with its fields and no others.

    Raises ValueError that names the first field that is missing, unknown (unless ``drops_unknown``), or of
    another type than ``cls`` says.
    """
    try:
        # The values pass through JSON text, in which tuples are lists and all keys are text.
        return parse_fields(cls, json.dumps(values).encode(), drops_unknown=drops_unknown)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_fields(cls: type[Parsed], content: bytes, *, drops_unknown: bool = False) -> Parsed:
    """Make an object as :func:`from_fields` does, from a file's bytes."""
    values = parse_json(content)
    try:
        json.dumps(values, ensure_ascii=False).encode()
        parsed: Parsed = _reader(cls, drops_unknown)(values, "")  # type: ignore[arg-type]
    except UnicodeEncodeError as error:
        raise ValueError(f"{cls.__name__} holds text that is not Unicode ({error.reason})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return parsed


@cache
def _reader(kind: Any, drops_unknown: bool) -> Reader:
    """A function of a value and its name, for values of one type; TypeError for types that JSON has not."""
    if kind is Any:
        return lambda value, name: value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind, drops_unknown)
    if kind in PLAIN_KINDS:
        return _of_plain(*PLAIN_KINDS[kind], float if kind is float else None)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _of_literal(inner)
    if origin in (Union, UnionType) and inner[1:] == (NoneType,):
        return _of_optional(_reader(inner[0], drops_unknown))
    if origin in (list, tuple, Sequence) and (origin is not tuple or inner[1:] == (...,)):
        return _of_items(_reader(inner[0], drops_unknown), tuple if origin is tuple else list)
    if origin is dict and inner[0] is str:
        return _of_dict(_reader(inner[1], drops_unknown))
    raise TypeError(f"no reader for values of type {kind}")


def _of_dataclass(cls: type, drops_unknown: bool) -> Reader:
    kinds = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    readers = {field: _reader(kinds[field], drops_unknown) for field in fields}
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, name or cls.__name__, "an object")
        prefix = f"{name}." if name else ""
        for field in required:
            if field not in value:
                raise ValueError(f"{prefix}{field} is missing")
        found = {}
        for field, one in value.items():
            if field in readers:
                found[field] = readers[field](one, f"{prefix}{field}")
            elif not drops_unknown:
                raise ValueError(f"{_cut(prefix + field)} is not a field of this format")
        return cls(**found)

    return read


def _of_plain(types: tuple[type, ...], rule: str, convert: Callable[[Any], Any] | None) -> Reader:
    def read(value: Any, name: str) -> Any:
        if type(value) not in types:
            raise _misfit(value, name, rule)
        return convert(value) if convert else value

    return read


def _of_literal(choices: tuple[Any, ...]) -> Reader:
    rule = " or ".join(repr(choice) for choice in choices)

    def read(value: Any, name: str) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _misfit(value, name, rule)
        return value

    return read


def _of_optional(reader: Reader) -> Reader:
    return lambda value, name: None if value is None else reader(value, name)


def _of_items(reader: Reader, collect: Callable[[Any], Any]) -> Reader:
    def read(value: Any, name: str) -> Any:
        if not isinstance(value, list):
            raise _misfit(value, name, "a valid list")
        return collect(reader(item, f"{name}.{index}") for index, item in enumerate(value))

    return read


def _of_dict(reader: Reader) -> Reader:
    def read(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, name, "an object")
        return {key: reader(item, f"{name}.{key}") for key, item in value.items()}

    return read


def _misfit(value: Any, name: str, rule: str) -> ValueError:
    return ValueError(f"{_cut(name)} is {_shown(value)}, but it should be {rule}")


def _shown(value: Any) -> str:
    """A value for a message, however large it is."""
    return _cut(
        repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."
