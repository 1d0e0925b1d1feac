"""The text of a completion is what decoding prompt and completion adds to decoding the prompt, and stop
strings are found in it, whatever the tokenizer. Everything is decoded to see what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from specdist.engine.request import Request, Sequence
from specdist.engine.schedule.stopping import StopCheck, StopRules
from specdist.job.texts.token_texts import TokenTexts
from specdist.job.texts.tokens import detokenizer_of
from tests.detokenizers import KINDS, SPECIAL, Sayings, plain, word_ends

each_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
Kind = Callable[[], PreTrainedTokenizerFast]


def some_ids(sayings: Sayings, most: int, *, is_cut: bool = False, has_bytes: bool = True) -> list[int]:
    """Of a text that may end inside a character."""
    found = sayings.tokens(int(sayings.random.integers(most)), has_bytes=has_bytes)
    return found[: int(sayings.random.integers(len(found) + 1))] if is_cut else found


def after(prompt_ids: list[int]) -> Sequence:
    request = Request(row_id=0, sample_index=0, prompt_ids=prompt_ids)
    return Sequence(request=request, order=1, stream_key=0, max_length=10**6, token_ids=[*prompt_ids])


@each_kind
def test_tokens_add_what_decoding_everything_adds(make: Kind) -> None:
    """Also after prompts that are empty, end inside a character, or are special tokens alone."""
    tokenizer = make()
    detokenizer, sayings = detokenizer_of(tokenizer), Sayings(tokenizer, 0)
    for number in range(1000):
        before_ids = some_ids(sayings, 12, is_cut=number % 3 == 0)
        token_ids = some_ids(sayings, 8, is_cut=number % 2 == 0)
        for skip_special in (True, False):
            found = detokenizer.added(before_ids, token_ids, skip_special=skip_special)
            assert found == plain(tokenizer, before_ids, token_ids, skip_special=skip_special)


def stops_of(tokenizer: PreTrainedTokenizerFast, sayings: Sayings) -> tuple[str, ...]:
    """Pieces of what the tokenizer writes, one with a special token, some with a space in front."""
    found: list[str] = []
    while len(found) < 3:
        whole = plain(
            tokenizer,
            sayings.tokens(3, has_bytes=False),
            sayings.tokens(6, has_bytes=False),
            skip_special=False,
        )
        begin = int(sayings.random.integers(max(1, len(whole))))
        piece = whole[begin : begin + int(sayings.random.integers(2, 14))]
        if len(piece) > 1 and (len(found) < 2 or any(name in piece for name in SPECIAL)):
            found.append(piece)
    return tuple(found)


def expected_check(
    tokenizer: PreTrainedTokenizerFast, sequence: Sequence, new_ids: list[int], strings: tuple[str, ...]
) -> StopCheck:
    """After the first token with which the completion's text has a stop string."""
    prompt_ids = sequence.request.prompt_ids
    for count in range(1, len(new_ids) + 1):
        said = sequence.token_ids[len(prompt_ids) :] + new_ids[:count]
        whole = plain(tokenizer, prompt_ids, said, skip_special=False)
        if any(string in whole for string in strings):
            return StopCheck(count, "stop")
    return StopCheck(len(new_ids), None)


def expected_text(
    tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int], token_ids: list[int], strings: tuple[str, ...]
) -> str:
    """Up to the stop string, without the characters of special tokens."""
    whole = plain(tokenizer, prompt_ids, token_ids, skip_special=False)
    end = min((place for string in strings if (place := whole.find(string)) >= 0), default=len(whole))
    kept = [True] * len(whole)
    for index, token_id in enumerate(token_ids):
        if tokenizer.convert_ids_to_tokens(token_id) in SPECIAL:
            begin, until = (
                len(plain(tokenizer, prompt_ids, token_ids[:count], skip_special=False))
                for count in (index, index + 1)
            )
            kept[begin:until] = [False] * (until - begin)
    return "".join(letter for letter, is_kept in zip(whole[:end], kept, strict=False) if is_kept)


@each_kind
def test_stop_strings_end_a_completion_as_in_all_of_its_text(make: Kind) -> None:
    """With special tokens in them, with spaces in front, over blocks that end inside a character, and after
    prompts that hold them. Few tokens are decoded for each."""
    tokenizer = make()
    detokenizer, sayings = detokenizer_of(tokenizer), Sayings(tokenizer, 1)
    num_stops = num_special = 0
    # Where a space does not belong to the special token before it, only its word tells of it.
    is_special = {tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    for number in range(120):
        is_sound, sayings.share_of_characters = number % 2 == 0, 0.3 if number % 3 else 0.9
        strings = stops_of(tokenizer, sayings)
        rules = StopRules(detokenizer, strings=strings)
        sequence = after(sayings.words(1) + some_ids(sayings, 12, has_bytes=not is_sound))
        prompt_ids, found = sequence.request.prompt_ids, None
        while len(sequence.token_ids) < 90 and (found is None or found.reason is None):
            new_ids = some_ids(sayings, 5, is_cut=not is_sound, has_bytes=not is_sound)
            found = rules.check(sequence, new_ids)
            assert found == expected_check(tokenizer, sequence, new_ids, strings)
            sequence.token_ids += new_ids[: found.num_kept]
        said, is_stopped = (
            sequence.token_ids[len(prompt_ids) :],
            found is not None and found.reason is not None,
        )
        if not is_stopped:
            assert rules.text(sequence) == plain(tokenizer, prompt_ids, said)
        elif is_sound and (make is not word_ends or not is_special.intersection(said)):
            assert rules.text(sequence) == expected_text(tokenizer, prompt_ids, said, strings)
        num_stops += is_stopped
        num_special += is_stopped and strings[2] in plain(tokenizer, prompt_ids, said, skip_special=False)
    assert num_stops > 20 and num_special > 1, (num_stops, num_special)


@each_kind
def test_few_tokens_are_decoded_for_a_stop_string_however_long_the_completion(make: Kind) -> None:
    """Whatever the tokens are: those of no text, or of no character, too."""
    tokenizer, lengths = make(), list[int]()
    detokenizer, sayings = detokenizer_of(tokenizer), Sayings(tokenizer, 2)

    def decode(token_ids: list[int], skip_special: bool) -> str:
        lengths.append(len(token_ids))
        return detokenizer.decode(token_ids, skip_special)

    rules = StopRules(dataclasses.replace(detokenizer, decode=decode), strings=("no such text",))
    some = [sayings.tokens(500), sayings.tokens(500, has_bytes=False)]
    for said in (*some, *([token_id] * 200 for token_id in set(some[0][:30]))):
        sequence = after([])
        for token_id in said:
            assert rules.check(sequence, [token_id]) == StopCheck(1, None)
            sequence.token_ids.append(token_id)
    assert max(lengths) <= len("no such text") + 5


@each_kind
def test_texts_of_tokens_are_together_the_completion(make: Kind) -> None:
    """Also where bytes are no characters; those of other tokens are what they would add."""
    tokenizer = make()
    detokenizer, sayings = detokenizer_of(tokenizer), Sayings(tokenizer, 3)
    for number in range(300):
        is_sound = number % 2 == 0
        prompt_ids = some_ids(sayings, 12, has_bytes=not is_sound)
        token_ids = some_ids(sayings, 25, is_cut=not is_sound, has_bytes=not is_sound)
        found = TokenTexts(detokenizer, prompt_ids, token_ids)
        assert len(found.texts) == len(token_ids)
        assert "".join(found.texts) == plain(tokenizer, prompt_ids, token_ids)
        if not is_sound or not token_ids:
            continue
        index, (other_id,) = int(sayings.random.integers(len(token_ids))), sayings.words(1)
        before = plain(tokenizer, prompt_ids, token_ids[:index])
        if "\ufffd" not in before and other_id != token_ids[index]:
            assert before == "".join(found.texts[:index])
            whole = plain(tokenizer, prompt_ids, [*token_ids[:index], other_id])
            assert found.other(index, other_id) == whole.removeprefix(before).rstrip("\ufffd")
        assert found.other(index, token_ids[index]) == found.texts[index]


def test_a_stop_string_of_many_tokens_is_found_late_in_a_completion() -> None:
    """Three tokens for each of its characters."""
    tokenizer = KINDS[0]()
    rules, sequence = StopRules(detokenizer_of(tokenizer), strings=("好你好",)), after([])
    said = [f"<0x{byte:02X}>" for byte in ("你" * 20 + "好你好").encode()]
    *committed, last = tokenizer.convert_tokens_to_ids(said)
    sequence.token_ids += committed
    assert rules.check(sequence, [last, committed[0]]) == StopCheck(1, "stop")
