"""Chat messages as files have them, in OpenAI's forms too, and as chat templates take them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from specdist.utils.json_values import parse_json

JSON_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
# Optional fields of a message in OpenAI's format, which its clients write as null where they are not given.
OPTIONAL = frozenset(
    ["annotations", "audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls"]
)
# The column, or field, of a conversation's tools.
TOOLS = "tools"


class RowError(Exception):
    """A row that cannot be used: the job goes on, and ``reason`` is written to the row's ``error`` column."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MessageError(RowError):
    """A message that cannot be used, with its place and the reason."""


def chat_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """A conversation of a column or field ``name``, each message as :func:`chat_message`.

    Raises :class:`MessageError`."""
    if not isinstance(value, list):
        raise MessageError(f"{name} is {described(value)}, not a list of chat messages")
    return [chat_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def chat_message(place: str, message: Any) -> dict[str, Any]:
    """The message with lists of parts as :func:`_part`, and without :data:`OPTIONAL` fields that are null;
    other nulls stay.

    Content may be missing or null beside calls of tools. Raises :class:`MessageError`.
    """
    if message is None:
        raise MessageError(f"{place} is null")
    if not isinstance(message, Mapping):
        shown = described(message)
        raise MessageError(f"{place} is {shown}, not a message with the strings role and content")
    found = {key: value for key, value in message.items() if value is not None or key not in OPTIONAL}
    role, content = found.get("role"), found.get("content")
    if role is None:
        raise MessageError(f"{place} has no role")
    if not isinstance(role, str):
        raise MessageError(f"{place}.role is {described(role)}, not text")
    if isinstance(content, list):
        found["content"] = [_part(f"{place}.content[{number}]", part) for number, part in enumerate(content)]
    elif content is None and not (found.get("tool_calls") or found.get("function_call")):
        raise MessageError(f"{place} has no content")
    elif content is not None and not isinstance(content, str):
        raise MessageError(f"{place}.content is {described(content)}, not text")
    return found


def _part(place: str, part: Any) -> dict[str, Any]:
    """A part of a message's content, which may be its text alone, with its type and without nulls."""
    if isinstance(part, str):
        part = {"text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return {"type": "text"} | {name: value for name, value in part.items() if value is not None}
    shown = described(part) if kind is None else f"type {kind}" if kind != "text" else "without text"
    raise MessageError(f"{place} is a part that is not text ({shown}): give text alone")


def tools_of(name: str, value: Any) -> list[dict[str, Any]]:
    """The tools of a column or field ``name``: a list of objects, or such a list as JSON text; null and an
    empty list or text are none. Raises :class:`MessageError`."""
    if isinstance(value, str):
        try:
            value = parse_json(value.encode()) if value.strip() else None
        except ValueError as error:
            raise MessageError(f"{name} is {described(value)}, which is not JSON: {error}") from error
    tools = [] if value is None else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MessageError(f"{name} is {described(tools)}, not a list of tools, which are objects")
    return tools


def why_not_text(name: str, value: Any) -> str | None:
    """What is wrong with a value that should be text; None if it is."""
    return None if isinstance(value, str) else f"{name} is {described(value)}, not text"


def why_not_turns(name: str, value: Any) -> str | None:
    """What is wrong with a value that should be a list of texts, nulls aside; None if nothing is."""
    if not isinstance(value, list):
        return f"{name} is {described(value)}, not a list of user messages"
    wrong = (why_not_text(f"{name}[{index}]", text) for index, text in enumerate(value) if text is not None)
    return next(filter(None, wrong), None)


def why_not_messages(name: str, value: Any) -> str | None:
    """What is wrong with a value that should be a list of messages; None if nothing is."""
    try:
        chat_messages(name, value)
    except MessageError as error:
        return str(error)
    return None


def described(value: Any) -> str:
    """A value of JSON, for messages."""
    if value is None:
        return "null"
    return f"{JSON_TYPES.get(type(value), type(value).__name__)} ({reprlib.repr(value)})"
