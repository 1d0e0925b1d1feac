"""Random JSON schemas, and random texts that their masks allow."""

from __future__ import annotations

import random
from typing import Any

from specdist.sampling.constraints.constraint import Constraint
from tests.sampling.constraints.sentences import BYTES_END, byte_grammars, byte_tokenizer
from tests.sampling.constraints.test_matcher import allowed

NUMBERS = [0, 1, -1, 10, 0.5, -0.5, 0.1, 1.5, 99.9, -3.75, 0.07, 1e-7, 1e22, 1e15 + 0.5, -0.0]
LARGE = [2**53 - 1, 2**53 + 1, -(2**53), 2**60, 2**60 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 1e300]
LETTERS = ["a", "b", "é", '"', "\\", "/", "\n", "\x00", "\x7f", " ", "😀", "\u2028", "{", "\ud800"]
PATTERNS = ["^[a-z]+$", "a|b", r"^\d{3}$", "^(ab)+$", "^.{2,4}$", "é", '^[^"]*$', r"^[^\\]{1,3}$", r"\.",
            r"^[^\x00-\x1f]+$", r"^[\x00-\x1f]$", r"^a\x01$", r"^\D$", r"\n"]  # fmt: skip
FORMATS = ["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname"]
# Tokens at which much is decided.
DECISIVE = set('"\\],}u0-.e:')


def _number(rng: random.Random) -> float:
    chosen = [rng.randint(-20, 20), rng.choice(NUMBERS), round(rng.uniform(-99, 99), rng.randint(0, 3))]
    return rng.choice([*chosen, *chosen, *chosen, rng.choice(LARGE)])


def _value(rng: random.Random, depth: int) -> Any:
    simple = [_number(rng), "".join(rng.choices(LETTERS, k=rng.randint(0, 3))), True, None]
    inner = [_value(rng, depth + 1) for _ in range(rng.randint(0, 2))] if depth < 2 else []
    return rng.choice([*simple, inner, {rng.choice(LETTERS): each for each in inner}])


def _some(rng: random.Random, share: float, **keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if rng.random() < share}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """With ``$defs`` at its top."""
    if depth == 0:
        return {**random_schema(rng, 1), "$defs": {"d": random_schema(rng, 3)}}

    def inner() -> dict[str, Any]:
        return random_schema(rng, depth + 1)

    least = rng.randint(0, 3)
    number = _some(rng, 0.3, minimum=_number(rng), exclusiveMinimum=_number(rng), maximum=_number(rng),
                   exclusiveMaximum=_number(rng), multipleOf=rng.choice([1, 3, 0.1, 0.25, 100]))  # fmt: skip
    texts = _some(rng, 0.4, pattern=rng.choice(PATTERNS), minLength=least, maxLength=rng.randint(3, 6))
    names = [rng.choice([*LETTERS, "default", "format"]) for _ in range(least)]
    kinds = [
        {"type": rng.choice(["integer", "number", ["integer", "null"]]), **number},
        number,
        {"type": "string", **texts},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"const": _value(rng, 0)},
        {"enum": [_value(rng, 1) for _ in range(rng.randint(1, 3))]},
        {"$ref": "#/$defs/d"},
    ]
    if depth < 3 and rng.random() < 0.5:
        others = rng.choice([False, True, inner()])
        kinds = [
            {"type": "object", "properties": {name: inner() for name in names}, "required": names[:2],
             **_some(rng, 0.4, additionalProperties=others, minProperties=least,
                     patternProperties={rng.choice(PATTERNS): inner()})},
            {"type": "array", **_some(rng, 0.6, items=rng.choice([False, inner()]), minItems=least,
                                      maxItems=3, prefixItems=[inner()])},
            {rng.choice(["anyOf", "oneOf", "allOf"]): [inner(), inner()], **_some(rng, 0.2, minimum=1)},
        ]  # fmt: skip
    return rng.choice(kinds)


def random_text(schema: Any, rng: random.Random, most_tokens: int) -> str | None:
    """Of random tokens among the allowed ones; None if it does not end. Raises :class:`ConstraintError`."""
    grammars, tokens = byte_grammars(), byte_tokenizer()
    matcher = grammars.matcher(Constraint("json_schema", schema).grammar)
    names = tokens.convert_ids_to_tokens(range(len(tokens)))
    token_ids: list[int] = []
    while len(token_ids) < most_tokens:
        found = allowed(grammars, matcher, len(tokens), token_ids)
        if BYTES_END in found and (len(found) == 1 or rng.random() < 0.4):
            return str(tokens.decode(token_ids))
        found = [token_id for token_id in found if token_id != BYTES_END]
        if not found:
            assert matcher.failure
            return None
        decisive = [token_id for token_id in found if names[token_id] in DECISIVE]
        token_ids.append(rng.choice(decisive if decisive and rng.random() < 0.6 else found))
    return None
