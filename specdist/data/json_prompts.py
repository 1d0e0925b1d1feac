"""Values of a JSONL file that cannot be a prompt: they spoil their row, not the file.

An Arrow column has one type, so that one number among texts could not even be read. Such a value is taken out
before the conversion (null stands in its place), and the reason is kept for its row.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdist.utils.errors import UserError

JSON_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


@dataclass
class PromptColumn:
    """The column of prompts while a file is read.

    Attributes:
        is_chat: it must hold lists of messages, and else text.
        reasons: why a row cannot be used, by its number; nulls are not among them.
        num_usable: values of the right type.
    """

    name: str
    is_chat: bool
    reasons: dict[int, str] = field(default_factory=dict)
    num_usable: int = 0

    def clean(self, row: int, values: dict[str, Any]) -> None:
        """Take the prompt out of a row's ``values`` if it is of a wrong type."""
        value = values.get(self.name)
        if value is None:
            return
        find: Callable[[str, Any], str | None] = why_not_messages if self.is_chat else why_not_text
        reason = find(self.name, value)
        if reason is None:
            self.num_usable += 1
        else:
            self.reasons[row] = reason
            values[self.name] = None

    def check(self, path: str) -> None:
        """Raises :class:`UserError` if every value has a wrong type: the column is wrong then."""
        if self.reasons and not self.num_usable:
            option, other = ("messages_column", "for plain text use --prompt_column")
            if not self.is_chat:
                option, other = ("prompt_column", "for chat messages use --messages_column")
            row, reason = next(iter(self.reasons.items()))
            raise UserError(
                f"--{option} {self.name} has no usable prompt in --prompts {path}: in row {row}, {reason}; "
                f"{other}"
            )


def why_not_text(name: str, value: Any) -> str | None:
    """What is wrong with a value that should be text; None if it is."""
    return None if isinstance(value, str) else f"{name} is {_described(value)}, not text"


def why_not_messages(name: str, value: Any) -> str | None:
    """What is wrong with a value that should be a list of messages, nulls aside; None if nothing is."""
    if not isinstance(value, list):
        return f"{name} is {_described(value)}, not a list of chat messages"
    for index, message in enumerate(value):
        if message is not None and not isinstance(message, Mapping):
            return (
                f"{name}[{index}] is {_described(message)}, not a message with the strings role and content"
            )
        for key in ("role", "content"):
            text = None if message is None else message.get(key)
            if text is not None and not isinstance(text, str):
                return why_not_text(f"{name}[{index}].{key}", text)
    return None


def _described(value: Any) -> str:
    return f"{JSON_TYPES[type(value)]} ({reprlib.repr(value)})"
