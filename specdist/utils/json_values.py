"""JSON that may be damaged: whatever is wrong with it is a ValueError, before anybody relies on a value."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Parsed = TypeVar("Parsed")


def parse_json(content: bytes) -> Any:
    """The document in a file's bytes. Raises ValueError for what is none, however it is none."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_object(content: bytes) -> dict[str, Any]:
    """As :func:`parse_json`, for a document that has to be an object."""
    values = parse_json(content)
    if not isinstance(values, dict):
        raise ValueError(f"it holds {_shown(values)}, not an object")
    return values


def from_fields(cls: type[Parsed], values: Any) -> Parsed:
    """The dataclass ``cls``, nested ones included, from an object with its fields and no others.

    Raises ValueError that names a field that is missing, unknown, or of another type than ``cls`` says.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{_shown(values)} is no {cls.__name__}")
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for name in values:
        if name not in hints:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
    found = {}
    for item in fields:
        if item.name in values:
            found[item.name] = _checked(item.name, hints[item.name], values[item.name])
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__} lacks the field {item.name!r}")
    return cls(**found)


def _checked(name: str, hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_fields(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name} {_shown(value)} is not one of {', '.join(map(str, get_args(hint)))}")
    if not _fits(hint, value):
        raise ValueError(f"{name} is {_shown(value)}, which has the wrong type")
    if get_origin(hint) is dict and get_args(hint)[0] is int:
        # JSON has no numbers as keys.
        return {int(key): item for key, item in value.items()}
    return value


def _fits(hint: Any, value: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(choice, value) for choice in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, Sequence):
        return isinstance(value, list) and all(_fits(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(arguments[1], item) for item in value.values())
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _shown(value: Any) -> str:
    """A value for a message, however large it is."""
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
