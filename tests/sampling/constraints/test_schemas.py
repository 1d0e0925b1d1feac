"""A completion that ends matches its schema, in exact numbers, or the schema is refused: where llguidance
itself would allow an instance that does not match, the texts here say which."""

from __future__ import annotations

from typing import Any

import pytest

from specdist.sampling.constraints.constraint import Constraint, ConstraintError
from tests.sampling.constraints.sentences import BYTES_END, byte_grammars, byte_tokenizer
from tests.sampling.constraints.test_matcher import allowed

OPEN = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}


def accepts(schema: Any, text: str) -> bool:
    grammars, tokenizer = byte_grammars(), byte_tokenizer()
    matcher = grammars.matcher(Constraint("json_schema", schema).grammar)
    token_ids = tokenizer.encode(text)
    return matcher.follow(token_ids) and BYTES_END in allowed(grammars, matcher, len(tokenizer), token_ids)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.1", "0"),
        ({"type": "integer", "minimum": 2**53, "exclusiveMaximum": 2**53 + 9}, f"{2**53}", f"{2**53 + 9}"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, f"{2**63 - 1}", f"{2**63}"),
        ({"type": "integer", "minimum": -(2**63)}, f"{1024 - 2**63}", f"{-(2**63) - 1}"),
        ({"enum": [2**53 + 2]}, f"{2**53 + 2}", f"{2**53 + 3}"),
        ({"pattern": '^[^"]$', "type": "string"}, '"a"', r'"\""'),
        ({"pattern": r"^[^\\\n]$", "type": "string"}, r'"\""', r'"\\"'),
        (OPEN | {"additionalProperties": True}, '{"a": 1, "b": null}', r'{"a": 1, "\u0061": null}'),
        (OPEN | {"patternProperties": {'^[^"a]$': False}}, r'{"a": 1, "\"": 1}', '{"a": 1, "b": 1}'),
        ({"properties": {"default": {"format": "date"}}}, '{"default": 1}', '{"default": "2023-02-29"}'),
        ({"type": "string", "format": "time"}, '"23:59:59Z"', '"12:00:60Z"'),
        (True, '{"a": [1]}', "nothing"),
    ],
)  # fmt: skip
def test_what_llguidance_would_not_keep_is_kept(schema: Any, right: str, wrong: str) -> None:
    assert accepts(schema, right) and not accepts(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"const": 2**53 + 1}}}, f"at /properties/a: const {2**53 + 1} would become"),
        ({"items": {"enum": [{"b": [12345678901234567]}]}}, "at /items: enum 12345678901234567 would"),
        ({"anyOf": [{"type": "integer", "minimum": 2**53 + 1}]}, "at /anyOf/0: minimum 9007199254740993"),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1},
            "at /: maximum -92233720368547758",
        ),
        ('{"maximum": 0.12345678901234567890}', "0.12345678901234567890 has more digits than a float64"),
        ({"minimum": float("nan")}, "NaN is not a number of JSON"),
        ({"allOf": [{"multipleOf": 99999}, {"multipleOf": 100000}]}, "common multiple beyond 2**32"),
        ({"const": "a\x7f"}, "has a control character"),
        ({"pattern": r"^a\x01$"}, "at /pattern: '^a\\\\x01$' asks for control characters"),
        ({"minProperties": 3, "required": ["a"]}, "minProperties 3 needs 2 names in required"),
        ({"const": "\ud800"}, "surrogates not allowed"),
        ({"$ref": "#"}, "no token is allowed next"),
        ('{"items":' * 90000 + "{}" + "}" * 90000, "nested too deeply"),
        (False, "the schema is false, which nothing matches"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        _ = Constraint("json_schema", schema).grammar
    assert words in str(caught.value)


def test_a_dead_end_is_no_end() -> None:
    """Of an item that nothing matches, llguidance allows the end in its place."""
    grammars, tokenizer = byte_grammars(), byte_tokenizer()
    items = {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1}
    schema = items | {"$defs": {"d": {"$ref": "#/$defs/d"}}}
    matcher = grammars.matcher(Constraint("json_schema", schema).grammar)
    assert allowed(grammars, matcher, len(tokenizer), tokenizer.encode("[")) == []
    assert matcher.failure == "no token is allowed next, and the completion may not end here"


def test_many_choices_are_matched() -> None:
    """More than the 2,000 alternatives that llguidance's parser follows side by side."""
    grammars, tokenizer = byte_grammars(), byte_tokenizer()
    matcher = grammars.matcher(Constraint("choices", [f"option {i}" for i in range(5000)]).grammar)
    assert matcher.follow(tokenizer.encode("option 4999"))
    ends = allowed(grammars, matcher, len(tokenizer), tokenizer.encode("option 4999"))
    assert ends == [BYTES_END] and not matcher.follow(tokenizer.encode("option 5000"))
