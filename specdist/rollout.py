"""What a user's function between turns (``--rollout``) answers about a completion.

    from specdist import rollout

    def check(row, messages):  # or async def
        return rollout.accept() if messages[-1]["content"].strip() else rollout.reject("it is empty")

``row`` holds the columns of the input and ``row_id``; ``messages`` is the conversation up to and with the
completion, dicts with ``role`` and ``content``. Wrong arguments raise ValueError.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, Literal

from specdist.utils.json_values import from_fields

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the functions below return; of kind "error", with its reason, where the user's function failed."""

    kind: Literal["accept", "reject", "messages", "give_up", "error"]
    score: float | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""

    def __post_init__(self) -> None:
        values = {**self.columns, "messages": self.messages, "reason": self.reason}
        try:
            for name, value in values.items():  # noqa: B007
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} cannot be written as JSON: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Answer:
        """Raises ValueError for what :meth:`to_json` does not return."""
        return from_fields(cls, values)


def accept(score: float | None = None, **columns: Any) -> Answer:
    """Keep this completion. ``score``: a finite number, higher is better; ``columns``: further ones of the
    output's row, values that JSON has."""
    is_number = score is None or (isinstance(score, Real) and math.isfinite(score))
    _check(is_number, "score", score, "a finite number or None")
    return Answer(kind="accept", score=None if score is None else float(score), columns=columns)


def reject(reason: str) -> Answer:
    """Generate another completion in place of this one."""
    return Answer(kind="reject", reason=_checked(reason))


def messages(messages: list[dict[str, Any]]) -> Answer:
    """Go on: these messages follow the completion, and the model answers them. Each has a ``role`` of
    :data:`ROLES` and a text as ``content``; what else it has is for the chat template."""
    _check(isinstance(messages, list) and messages != [], "messages", messages, "a list of one or more dicts")
    for place, message in enumerate(messages):
        _check(isinstance(message, dict), f"message {place}", message, "a dict")
        role, content = message.get("role"), message.get("content")
        _check(role in ROLES, f"the role of message {place}", role, f"one of {', '.join(ROLES)}")
        _check(isinstance(content, str), f"the content of message {place}", content, "a text")
    return Answer(kind="messages", messages=messages)


def give_up(reason: str) -> Answer:
    """End this row without a completion."""
    return Answer(kind="give_up", reason=_checked(reason))


def _checked(reason: str) -> str:
    _check(isinstance(reason, str) and bool(reason.strip()), "reason", reason, "a text that is not empty")
    return reason


def _check(fits: bool, name: str, value: Any, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value!r:.60}, but it should be {rule}")
