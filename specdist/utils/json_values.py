"""JSON that may be damaged: whatever is wrong with it is a ValueError, before anybody relies on a value."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

# Pydantic is imported where it is used: a command's --help reads no JSON, and should not wait for it.
if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Parsed = TypeVar("Parsed")
MAX_SHOWN_CHARACTERS = 60


def parse_json(content: bytes) -> Any:
    """The document in a file's bytes. Raises ValueError for what is not JSON, whatever is wrong with it."""
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

    Raises ValueError that names the first field that is missing, unknown, or of another type than ``cls``
    says.
    """
    try:
        # As JSON text, since JSON has no numbers as keys: strict validation of Python objects refuses them.
        return parse_fields(cls, json.dumps(values).encode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_fields(cls: type[Parsed], content: bytes) -> Parsed:
    """As :func:`from_fields`, from a file's bytes."""
    from pydantic import ValidationError

    try:
        [parsed] = _adapter(cls).validate_json(b"[%b]" % content)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(_message(cls, error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return parsed


@cache
def _adapter(cls: type[Parsed]) -> TypeAdapter[list[Parsed]]:
    from pydantic import ConfigDict, TypeAdapter

    # Of a list: pydantic takes no configuration beside a dataclass, but applies that of what it stands in.
    return TypeAdapter(list[cls], config=ConfigDict(strict=True, extra="forbid"))  # type: ignore[valid-type]


def _message(cls: type, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or cls.__name__
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{name} is not a field of this format"
    if first["type"] == "json_invalid":
        return f"{cls.__name__} holds text that is not Unicode ({first['ctx']['error']})"
    rule = first["msg"][:1].lower() + first["msg"][1:]
    return f"{name} is {_shown(first['input'])}, but {rule.replace('input should', 'it should')}"


def _shown(value: Any) -> str:
    """A value for a message, however large it is."""
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."
