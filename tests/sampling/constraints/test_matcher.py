"""Masks, against a matcher of llguidance that has only ever gone forward, and by parsing what they allow."""

from __future__ import annotations

import datetime
import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from specdist.sampling.constraints.constraint import Constraint
from specdist.sampling.constraints.matcher import (
    MIN_PARALLEL,
    Grammars,
    Matcher,
    masks_of_everything,
    only_tokens,
)
from tests.sampling.constraints.letters import END, TOKENS, letters_grammars, text_of
from tests.sampling.constraints.reference import allowed_by_llguidance, token_ids_of
from tests.sampling.constraints.sentences import BYTES_END, byte_grammars, byte_tokenizer

SCHEMAS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("schemas").glob("*.json"))
}


def allowed(grammars: Grammars, matcher: Matcher, vocab_size: int, token_ids: list[int]) -> list[int]:
    mask = masks_of_everything(1, vocab_size)
    grammars.fill(mask, [(matcher, 0, token_ids, len(token_ids))])
    return token_ids_of(mask[0])


@pytest.mark.parametrize("pattern", ["(ab|d)c?(ddd[abc]|ab)d?", "a{2,5}(bc)*", "(a|ab)(c|bcd)(d*)"])
def test_masks_are_a_function_of_the_tokens_alone(pattern: str) -> None:
    """Wherever the matcher was before: ahead, behind, in another branch, or astray."""
    grammars = letters_grammars()
    matcher = grammars.matcher(Constraint("regex", pattern).grammar)
    grammar = Constraint("regex", pattern).grammar
    rng = random.Random(1)
    visited: list[list[int]] = [[]]
    for _ in range(150):
        token_ids = rng.choice(visited)
        assert matcher.follow(token_ids)
        found = allowed(grammars, matcher, len(TOKENS), token_ids)
        assert found == [*allowed_by_llguidance(grammar, tuple(token_ids))]
        forced = matcher.forced_after(token_ids)
        assert bool(forced) == (len(found) == 1)
        for index, token_id in enumerate(forced):
            before = [*token_ids, *forced[:index]]
            assert allowed(grammars, matcher, len(TOKENS), before) == [token_id]
            assert allowed_by_llguidance(grammar, tuple(before)) == (token_id,)
        goes_on = [token_id for token_id in found if token_id != END]
        if goes_on:
            visited.append([*token_ids, rng.choice(goes_on)])
        elif found:
            assert re.fullmatch(pattern, text_of(token_ids))
        wrong = [token_id for token_id in range(1, len(TOKENS)) if token_id not in found]
        if wrong and rng.random() < 0.5:
            assert not matcher.follow([*token_ids, rng.choice(wrong), 1, 2])
        if rng.random() < 0.5:
            matcher.begin()


def test_masks_of_many_sequences_are_those_of_each() -> None:
    """By several threads; some of them known already, and some with candidates."""
    grammars = letters_grammars()
    grammar = Constraint("regex", "(ab|d)c?(ddd[abc]|ab)d?").grammar
    block = [5, 3, 4, 4, 4, 1, END]
    matchers = [grammars.matcher(grammar) for _ in range(2 * MIN_PARALLEL)]
    masks = masks_of_everything(8 * len(matchers), len(TOKENS))
    places = []
    for index, matcher in enumerate(matchers):
        begin, end = index % 3, index % 7
        if index % 2:
            allowed(grammars, matcher, len(TOKENS), block[: max(begin, end - 1)])
        places.append((matcher, 8 * index, block[: max(begin, end)], begin))
    grammars.fill(masks, places)
    for _, row, token_ids, begin in places:
        for index in range(len(token_ids) - begin + 1):
            found = token_ids_of(masks[row + index])
            assert found == [*allowed_by_llguidance(grammar, tuple(token_ids[: begin + index]))]


def test_a_single_allowed_token_is_found_in_any_word() -> None:
    masks = np.zeros((7, 3), np.int32)
    for row, token_id in enumerate([0, 31, 32, 63, 95]):
        masks[row, token_id // 32] = np.array(1 << token_id % 32, np.uint32).view(np.int32)
    masks[5, [0, 2]] = 1
    assert only_tokens(masks).tolist() == [0, 31, 32, 63, 95, -1, -1]


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_masks_of_a_schema_allow_is_an_instance_of_it(name: str) -> None:
    """Of random tokens among the allowed ones; an object that ends is complete."""
    grammars = byte_grammars()
    tokenizer = byte_tokenizer()
    matcher = grammars.matcher(Constraint("json_schema", SCHEMAS[name]).grammar)
    rng = random.Random(name)
    for _ in range(2):
        token_ids: list[int] = []
        while True:
            token_id = rng.choice(allowed(grammars, matcher, len(tokenizer), token_ids))
            if token_id == BYTES_END:
                break
            token_ids.append(token_id)
            assert len(token_ids) < 2000
        instance = json.loads(tokenizer.decode(token_ids))
        jsonschema.validate(instance, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


def test_dates_are_those_of_the_calendar() -> None:
    """The library's own rule has a 29th of February in every year."""
    grammars, tokenizer = byte_grammars(), byte_tokenizer()
    schema = {"properties": {"format": {"type": "string", "format": "date"}}, "required": ["format"]}
    of_day = grammars.matcher(Constraint("json_schema", schema).grammar)
    also = {"type": "string", "format": "date-time", "allOf": [{"pattern": "^(0|19|20)"}]}
    of_time = grammars.matcher(Constraint("json_schema", also).grammar)
    for year in ("0000", "0001", "0400", "1900", "2000", "2023", "2024"):
        for day in ("01-31", "02-28", "02-29", "02-30", "04-31", "12-31", "13-01"):
            try:
                exists = bool(datetime.date.fromisoformat(f"{year}-{day}"))
            except ValueError:
                exists = False
            assert of_day.follow(tokenizer.encode(f'{{"format": "{year}-{day}"')) == exists
            assert of_time.follow(tokenizer.encode(f'"{year}-{day}T01:02:03Z"')) == exists
    assert not of_time.follow(tokenizer.encode('"2124-'))


def test_choices_are_taken_literally() -> None:
    choices = ['say "no"', "a.b", "line\nbreak", "ü", "a"]
    grammars, tokenizer = byte_grammars(), byte_tokenizer()
    matcher = grammars.matcher(Constraint("choices", choices).grammar)
    for text in [*choices, "axb", "say no"]:
        token_ids = tokenizer.encode(text)
        is_whole = matcher.follow(token_ids) and BYTES_END in allowed(
            grammars, matcher, len(tokenizer), token_ids
        )
        assert is_whole == (text in choices), text
