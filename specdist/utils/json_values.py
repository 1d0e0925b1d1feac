"""JSON that may be damaged: whatever is wrong with it is a ValueError, before anybody relies on a value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Parsed = TypeVar("Parsed")
MAX_SHOWN_CHARACTERS = 60
_kinds_of = cache(get_type_hints)
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
        content = json.dumps(values, ensure_ascii=False).encode()
        return cast("Parsed", _read(cls, json.loads(content), "", drops_unknown))
    except UnicodeEncodeError as error:
        raise ValueError(f"{cls.__name__} holds text that is not Unicode ({error.reason})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_fields(cls: type[Parsed], content: bytes) -> Parsed:
    """Make an object as :func:`from_fields` does, from a file's bytes."""
    return from_fields(cls, parse_json(content))


def _read(kind: Any, value: Any, name: str, drops_unknown: bool) -> Any:
    """The value of a field of this type; TypeError for types that JSON has not."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, name, drops_unknown)
    if kind in PLAIN_KINDS:
        types, rule = PLAIN_KINDS[kind]
        _check(type(value) in types, value, name, rule)
        return float(value) if kind is float else value
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        is_choice = any(type(value) is type(choice) and value == choice for choice in inner)
        _check(is_choice, value, name, " or ".join(map(repr, inner)))
        return value
    if origin in (Union, UnionType) and inner[1:] == (NoneType,):
        return None if value is None else _read(inner[0], value, name, drops_unknown)
    if origin in (list, tuple, Sequence) and (origin is not tuple or inner[1:] == (...,)):
        _check(isinstance(value, list), value, name, "a valid list")
        items = [_read(inner[0], item, f"{name}.{i}", drops_unknown) for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict and inner[0] is str:
        _check(isinstance(value, dict), value, name, "an object")
        return {key: _read(inner[1], item, f"{name}.{key}", drops_unknown) for key, item in value.items()}
    raise TypeError(f"no reader for values of type {kind}")


def _read_dataclass(cls: Any, value: Any, name: str, drops_unknown: bool) -> Any:
    _check(isinstance(value, dict), value, name or cls.__name__, "an object")
    kinds, prefix, found = _kinds_of(cls), f"{name}." if name else "", {}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for field in fields.values():
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and field.name not in value:
            raise ValueError(f"{prefix}{field.name} is missing")
    for field_name, one in value.items():
        if field_name in fields:
            found[field_name] = _read(kinds[field_name], one, f"{prefix}{field_name}", drops_unknown)
        elif not drops_unknown:
            raise ValueError(f"{_cut(prefix + field_name)} is not a field of this format")
    return cls(**found)


def _check(fits: bool, value: Any, name: str, rule: str) -> None:
    if not fits:
        raise ValueError(f"{_cut(name)} is {_shown(value)}, but it should be {rule}")


def _shown(value: Any) -> str:
    """A value for a message, however large it is."""
    return _cut(
        repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."
