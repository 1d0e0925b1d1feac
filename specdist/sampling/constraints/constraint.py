"""Constraints of completions: a JSON schema, a regular expression, a Lark grammar or a list of choices.

A constraint is checked by llguidance before any model is loaded. It is optional.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from specdist.sampling.constraints.schemas import ConstraintError, exact_float, kept_schema

# The error of a place where llguidance allows nothing: after the last letter of a rule that nothing matches,
# say.
DEAD_END = "no token is allowed next, and the completion may not end here"
KINDS = ("json_schema", "regex", "grammar", "choices")
# The form of JSON as json.dumps writes it, so that all between two values is forced. A schema may say
# otherwise in its "x-guidance". Escapes of any character ("\\u0061") would let names come twice that are in
# "properties".
JSON_FORM: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


@dataclass(frozen=True)
class Constraint:
    """What a completion must match as a whole. ``value``: the schema, expression, grammar or choices."""

    kind: str
    value: Any

    @staticmethod
    def parse(value: object) -> Constraint:
        """Read a row's constraint: a mapping with one of ``KINDS``, or its JSON. Raises
        :class:`ConstraintError`."""
        given = value
        if isinstance(value, str):
            try:
                given = _parsed(value)
            except RecursionError as error:
                raise ConstraintError("it is nested too deeply") from error
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
        """The grammar as llguidance takes it. Raises :class:`ConstraintError` if it cannot be compiled."""
        try:
            grammar: str = getattr(self, f"_{self.kind}")()
            error = error_of(grammar)
        except RecursionError as error:
            raise ConstraintError("it is nested too deeply") from error
        except ConstraintError:
            raise
        except ValueError as error:
            # One cause is text that is not Unicode.
            raise ConstraintError(reason_of(str(error))) from error
        if error is not None:
            raise ConstraintError(error)
        return grammar

    def _json_schema(self) -> str:
        from llguidance import LLMatcher

        text = json.dumps(kept_schema(self._schema), ensure_ascii=False)
        text.encode()
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_FORM)

    @property
    def _schema(self) -> Any:
        """Raises :class:`ConstraintError` for text that is not a schema."""
        try:
            text = self.value if isinstance(self.value, str) else json.dumps(self.value)
            schema = _parsed(text)
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"the schema is not a JSON object: {error}") from error
        if schema is False:
            raise ConstraintError("the schema is false, which nothing matches")
        if not isinstance(schema, (dict, bool)):
            raise ConstraintError("the schema must be a JSON object")
        # llguidance takes true within a schema only.
        return {} if schema is True else schema

    def _regex(self) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(self._text())

    def _grammar(self) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_lark(self._text())

    def _choices(self) -> str:
        from llguidance import LLMatcher

        choices = self.value
        is_list = isinstance(choices, (list, tuple))
        if not is_list or not choices or not all(isinstance(each, str) for each in choices):
            raise ConstraintError("the choices must be a list of strings, at least one")
        if not all(choices):
            raise ConstraintError("a choice must not be the empty string")
        quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        # One token of the grammar: of 2,000 ones side by side llguidance's parser gives up.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {quoted}")

    def _text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise ConstraintError("it must be a text, and not empty")
        return self.value


def _parsed(text: str) -> Any:
    """JSON without numbers that float64 does not keep. Raises ValueError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    return json.loads(text, parse_float=exact_float, parse_constant=refuse)


class _Bytes:
    """A vocabulary of all bytes, and an end."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids, eos_token_id, bos_token_id = (256,), 256, None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes_tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


def error_of(grammar: str) -> str | None:
    """Why llguidance cannot compile a grammar, or begin to follow it; None if it can."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes_tokenizer(), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return reason_of(matcher.get_error()) if matcher.is_error() else None


def reason_of(message: str) -> str:
    """llguidance's error in one line, without the state that it adds."""
    reason = " ".join(message.split("\n<")[0].split())
    return DEAD_END if reason.startswith("NoExtension") else reason
