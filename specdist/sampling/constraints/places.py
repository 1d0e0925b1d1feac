"""Where in a JSON schema an error is: llguidance names the error, but not its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords of JSON schema whose values are schemas, by name, in a list, or alone.
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_ALONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_DEFINITIONS = ("$defs", "definitions")


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
