"""Where a completion ends if its end falls inside a block."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specdist.engine.request import FinishReason, Request
from specdist.engine.sequence import Sequence
from specdist.engine.stopping import StopCheck, StopRules
from tests.engine.harness import decode

EOS = 7


def sequence_of(num_committed: int, max_length: int) -> Sequence:
    request = Request(row_id=0, sample_index=0, prompt_ids=[1, 2])
    token_ids = [1, 2, *[0, 1, 2, 3, 4][:num_committed]]
    return Sequence(request=request, order=1, stream_key=0, max_length=max_length, token_ids=token_ids)


@pytest.mark.parametrize(
    ("new_ids", "num_kept", "reason"),
    [
        ([3, 3, 5], 3, None),
        ([], 0, None),
        ([3, EOS, 4, EOS], 2, "stop"),
        ([EOS], 1, "stop"),
        # "EF", of which the first letter may have been committed before.
        ([4, 5, 6], 2, "stop"),
        ([5, 6], 1, "stop"),
        # The stop token comes first, or the string does.
        ([EOS, 4, 5], 1, "stop"),
        ([4, 5, EOS], 2, "stop"),
        # Room for six.
        ([3, 3, 3, 3, 3, 3, 3], 6, "length"),
        ([3, 3, 3, 3, 3, 3], 6, "length"),
        ([3, 3, 3, 3, 3, EOS], 6, "stop"),
        ([3, 3, 3, 3, 3, 3, EOS], 6, "length"),
    ],
)
def test_a_block_is_kept_up_to_its_stop(
    new_ids: list[int], num_kept: int, reason: FinishReason | None
) -> None:
    rules = StopRules(decode, frozenset([EOS]), ("EF",))
    assert rules.check(sequence_of(5, max_length=13), new_ids) == StopCheck(num_kept, reason)


def test_next_tokens_end_the_sequences_that_any_or_their_own_one_ends() -> None:
    """As one check of each would say. Room for the next token alone, and stop strings, are seen before it."""
    sequences = [sequence_of(5, max_length) for max_length in (8, 9, 13, 13, 13, 8)]
    sequences[3].request = dataclasses.replace(sequences[3].request, stop=("EF",))
    next_ids = [3, 3, EOS, 5, -2, EOS]
    rules = StopRules(decode, frozenset([EOS]))
    assert rules.near_ends(sequences) == [0, 3, 5]
    ends = rules.ends(sequences, next_ids, rules.near_ends(sequences), not_finite=-2)
    assert ends == ["length", None, "stop", "stop", "error", "stop"]
    assert rules.ends(sequences[1:3], [3, 4], [], not_finite=-2) == [None, None]


def test_the_text_ends_before_the_first_stop_string() -> None:
    rules = StopRules(decode, frozenset(), ("EF", "C"))
    for token_ids, text in (([0, 1, 2, 4, 5], "AB"), ([0, 1, 3, 4, 5], "ABD"), ([0, 1, 3], "ABD")):
        sequence = sequence_of(0, max_length=13)
        sequence.token_ids += token_ids
        assert rules.text(sequence) == text


def test_a_request_has_stop_strings_of_its_own() -> None:
    """Instead of the run's."""
    rules, sequence = StopRules(decode, frozenset(), ("EF",)), sequence_of(0, max_length=13)
    sequence.request = dataclasses.replace(sequence.request, stop=("C", "D"))
    assert rules.check(sequence, [4, 5, 3, 1]) == StopCheck(3, "stop")
    sequence.token_ids += [4, 5, 3]
    assert rules.text(sequence) == "EF"


WORDS = ["END"]
LETTERS = ["a", "b", "é", "你", "好"]


def bytes_as_letters() -> tuple[Tokenizer, list[list[int]]]:
    """A byte-level tokenizer, and the tokens of texts that it may say."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    vocab = letters | {
        word: len(letters) + index for index, word in enumerate(["Ġ" + each for each in WORDS])
    }
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [*([index] for index in range(len(letters), len(vocab))), *spelt(tokenizer)]


def bytes_as_tokens() -> tuple[Tokenizer, list[list[int]]]:
    """Words with a mark for a space, and bytes for all else; a run of bytes is a text, or none of it is."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁" + word: 256 + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, [*([256 + index] for index in range(len(WORDS))), *spelt(tokenizer)]


def spelt(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(letters).ids for letters in LETTERS]


@pytest.mark.parametrize("tokenizer_of", [bytes_as_letters, bytes_as_tokens])
def test_a_stop_string_is_found_in_the_last_tokens_as_in_all_of_them(
    tokenizer_of: Callable[[], tuple[Tokenizer, list[list[int]]]],
) -> None:
    tokenizer, sayings = tokenizer_of()
    num_decoded: list[int] = []

    def decode(token_ids: list[int]) -> str:
        num_decoded.append(len(token_ids))
        return str(tokenizer.decode(token_ids))

    random, num_stops, num_short = np.random.default_rng(0), 0, 0
    strings = ("aba", "好你好", " ENDab")
    rules, sequence = StopRules(decode, strings=strings), sequence_of(0, max_length=10**6)
    for _ in range(700):
        said = [sayings[index] for index in random.integers(len(sayings), size=3)]
        new_ids = [token_id for each in said for token_id in each]
        if random.random() < 0.2:
            # A block may end inside a character.
            new_ids = new_ids[: random.integers(1, len(new_ids) + 1)]
        num_decoded.clear()
        found = rules.check(sequence, new_ids)
        num_short += bool(num_decoded) and max(num_decoded) < len(sequence.token_ids) - 2
        committed = sequence.token_ids[2:]
        stops: list[int] = []
        if any(each in tokenizer.decode(committed + new_ids) for each in strings):
            texts = [tokenizer.decode(committed + new_ids[:count]) for count in range(len(new_ids) + 1)]
            stops = [count for count, text in enumerate(texts) if any(each in text for each in strings)]
        expected = StopCheck(stops[0], "stop") if stops else StopCheck(len(new_ids), None)
        assert found == expected, (committed, new_ids)
        num_stops += bool(stops)
        is_over = stops or len(committed) > 300
        sequence.token_ids = sequence.token_ids[:2] if is_over else sequence.token_ids + new_ids
    assert num_stops > 20 and num_short > 100, (num_stops, num_short)


@pytest.mark.parametrize("tokenizer_of", [bytes_as_letters, bytes_as_tokens])
@pytest.mark.parametrize("num_letters", [1, 2, 3])
def test_a_stop_string_is_found_where_the_last_tokens_begin_inside_a_character(
    tokenizer_of: Callable[[], tuple[Tokenizer, list[list[int]]]], num_letters: int
) -> None:
    tokenizer, _ = tokenizer_of()
    rules, sequence = StopRules(tokenizer.decode, strings=("好你",)), sequence_of(0, max_length=10**6)
    sequence.token_ids += tokenizer.encode("你" * 30 + "a" * num_letters + "你" * 9 + "好").ids
    assert rules.check(sequence, tokenizer.encode("你a").ids) == StopCheck(3, "stop")
