"""Constraints of completions: a JSON schema, a regular expression, a Lark grammar or a list of choices.

A constraint is checked by llguidance before any model is loaded. It is optional: see :func:`check_installed`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specdist.sampling.constraints.dates import with_real_dates
from specdist.sampling.constraints.places import schema_place
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

KINDS = ("json_schema", "regex", "grammar", "choices")
# Of JSON as json.dumps writes it, so that all between two values is forced. A schema may say otherwise in
# its "x-guidance".
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ConstraintError(ValueError):
    """A constraint that cannot be used, with the reason for the one who wrote it."""


def check_installed(option: str) -> None:
    """Raises :class:`UserError` where llguidance is missing."""
    if importlib.util.find_spec("llguidance") is None:
        raise UserError(
            f"{option} needs the package llguidance, which is not installed: pip install -e "
            "'.[constraints]' in specdist's folder"
        )


@dataclass(frozen=True)
class Constraint:
    """What a completion must match as a whole. ``value``: the schema, expression, grammar or choices."""

    kind: str
    value: Any

    @staticmethod
    def parse(value: object) -> Constraint:
        """Of a row: a mapping with one of ``KINDS``, or its JSON. Raises :class:`ConstraintError`."""
        given = value
        if isinstance(value, str):
            try:
                given = parse_object(value.encode())
            except ValueError as error:
                raise ConstraintError(f"it is not a JSON object: {error}") from error
        if not isinstance(given, Mapping):
            raise ConstraintError(f"it must be a JSON object with one of {', '.join(KINDS)}")
        given = {name: inner for name, inner in given.items() if inner is not None}
        if len(given) != 1 or (kind := next(iter(given))) not in KINDS:
            named = ", ".join(map(str, given)) or "nothing"
            raise ConstraintError(f"it has {named}, but must have exactly one of {', '.join(KINDS)}")
        return Constraint(kind, given[kind])

    @cached_property
    def grammar(self) -> str:
        """As llguidance takes it. Raises :class:`ConstraintError`, with the place, if it cannot be
        compiled."""
        from llguidance import LLMatcher

        grammar = getattr(self, f"_{self.kind}")()
        error = _error_of(grammar)
        if error is None:
            return str(grammar)
        if self.kind != "json_schema":
            raise ConstraintError(_one_line(error))
        schema = json.loads(self._schema_text)
        place = schema_place(
            schema,
            lambda part: _error_of(LLMatcher.grammar_from_json_schema(part, defaults=JSON_FORM)) == error,
        )
        raise ConstraintError(f"at {place}: {_one_line(error)}")

    def _json_schema(self) -> str:
        from llguidance import LLMatcher

        schema = json.dumps(with_real_dates(json.loads(self._schema_text)))
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_FORM)

    @property
    def _schema_text(self) -> str:
        """Raises :class:`ConstraintError` for text that is not a schema."""
        value = self.value
        if isinstance(value, str):
            try:
                value = parse_object(value.encode())
            except ValueError as error:
                raise ConstraintError(f"the schema is not a JSON object: {error}") from error
        if not isinstance(value, (Mapping, bool)):
            raise ConstraintError("the schema must be a JSON object")
        return json.dumps(value)

    def _regex(self) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(self._text())

    def _grammar(self) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_lark(self._text())

    def _choices(self) -> str:
        from llguidance import LLMatcher

        choices = self.value
        if isinstance(choices, str) or not choices or not all(isinstance(each, str) for each in choices):
            raise ConstraintError("the choices must be a list of strings, at least one")
        if not all(choices):
            raise ConstraintError("a choice must not be the empty string")
        quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return LLMatcher.grammar_from_lark(f"start: {quoted}")

    def _text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise ConstraintError("it must be a text, and not empty")
        return self.value


def _error_of(grammar: str) -> str | None:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return "; ".join(messages) if is_error else None


def _one_line(message: str) -> str:
    return " ".join(message.split())
