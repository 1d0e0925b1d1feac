"""Where in a JSON schema an error is: llguidance names the error, but not its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords of JSON schema whose values are schemas, by name, in a list, or alone.
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_ALONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose values are values, not schemas.
_VALUES = ("const", "default", "enum", "examples")


class ConstraintError(ValueError):
    """A constraint that cannot be used, with the reason for the one who wrote it."""


def fault(place: str, reason: str) -> ConstraintError:
    """The error of the part of a schema at this JSON pointer."""
    return ConstraintError(f"at {place or '/'}: {reason}")


def rewritten(schema: Any, mend: Callable[[dict[str, Any], str], Any], place: str = "") -> Any:
    """The schema, with what ``mend`` makes of each of its parts, given their JSON pointers, inner ones first.
    What is under unknown keywords is taken for schemas too: references may lead there."""
    if isinstance(schema, list):
        return [rewritten(inner, mend, f"{place}/{index}") for index, inner in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for keyword, value in schema.items():
        inside = f"{place}/{_escaped(keyword)}"
        if keyword in _NAMED and isinstance(value, dict):
            found[keyword] = {
                name: rewritten(inner, mend, f"{inside}/{_escaped(name)}") for name, inner in value.items()
            }
        elif keyword not in _VALUES:
            found[keyword] = rewritten(value, mend, inside)
    return mend(found, place)


def values_in(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers, texts and others in a part's ``const`` and ``enum``, at any depth, each with its keyword."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, (dict, list)):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from leaves(inner)
        else:
            yield value

    for keyword in ("const", "enum"):
        yield from ((keyword, value) for value in leaves(part.get(keyword)))


def schema_place(schema: Any, has_error: Callable[[Any], bool]) -> str:
    """JSON pointer of the smallest part of the schema that has the error by itself; ``/`` for the whole.

    ``has_error``: whether a schema, by itself, has the error of the whole one.
    """
    definitions = (
        {name: schema[name] for name in _DEFINITIONS if name in schema} if _is_object(schema) else {}
    )
    place, part = "", schema
    while True:
        for name, inner in _parts(part, schema):
            if has_error({**definitions, **inner} if _is_object(inner) else inner):
                place, part = name if name.startswith("#") else place + name, inner
                break
        else:
            return place.removeprefix("#") or "/"


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _parts(part: Any, root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly in a schema, with their pointers in it; that of a reference is from the root."""
    if not _is_object(part):
        return
    for keyword in _NAMED:
        if _is_object(part.get(keyword)) and not (keyword in _DEFINITIONS and part is not root):
            yield from ((f"/{keyword}/{_escaped(name)}", inner) for name, inner in part[keyword].items())
    for keyword in _LISTED:
        if isinstance(part.get(keyword), list):
            yield from ((f"/{keyword}/{index}", inner) for index, inner in enumerate(part[keyword]))
    for keyword in _ALONE:
        if _is_object(part.get(keyword)):
            yield f"/{keyword}", part[keyword]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
