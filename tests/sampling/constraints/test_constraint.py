"""Constraints are checked before anything expensive: what is wrong, and where."""

from __future__ import annotations

from typing import Any

import pytest

from specdist.sampling.constraints.constraint import Constraint, ConstraintError

BAD_FORMAT = {"type": "string", "format": "no such format"}


def reason(kind: str, value: Any) -> str:
    with pytest.raises(ConstraintError) as caught:
        _ = Constraint(kind, value).grammar
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"properties": {"a": {"pattern": "(?<=x)y", "type": "string"}}}, "regex parse error: (?<=x)y"),
        ({"properties": {"a": {"anyOf": [{}, {"items": BAD_FORMAT}]}}}, "Unknown format: no such format"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "Pointer '/nowhere' does not exist"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ('{"type": ', "the schema is not a JSON object: "),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: Any, words: str) -> None:
    assert reason("json_schema", schema).startswith(words)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(ab", "unclosed group"),
        ("regex", "", "a text, and not empty"),
        ("grammar", "start: word", 'at 1(8): unknown name: "word"'),
        ("choices", [], "a list of strings, at least one"),
        ("choices", ["yes", ""], "must not be the empty string"),
    ],
)
def test_other_constraints_that_cannot_be_used_are_refused(kind: str, value: Any, words: str) -> None:
    assert words in reason(kind, value)


def test_a_row_gives_one_constraint_as_json_or_as_a_struct() -> None:
    assert Constraint.parse('{"regex": "a+"}') == Constraint("regex", "a+")
    # A kind may be null; a null in a schema is one that is meant.
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    assert Constraint.parse({"regex": None, "choices": None, "json_schema": schema}).value == schema
    for value, words in [
        ("[]", "must be a JSON object with one of"),
        ("no JSON", "not a JSON object"),
        (5, "must be a JSON object with one of json_schema, regex, grammar, choices"),
        ('{"regexp": "a"}', "it has regexp, but must have exactly one of"),
        ({"regex": "a", "choices": ["b"]}, "it has regex, choices, but must"),
        ({"regex": None}, "it has nothing, but must"),
    ]:
        with pytest.raises(ConstraintError, match=words.replace("[", r"\[")):
            Constraint.parse(value)
