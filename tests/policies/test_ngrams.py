"""Prompt lookup against its definition, and what a candidate must promise to be verified."""

from __future__ import annotations

import numpy as np
import pytest

from specdist.policies.costs import CostModel, Curve
from specdist.policies.ngrams import MAX_MATCH, NgramLengths, PromptLookup

MS = 10**6
NUM_ROWS = 10


def lookup_of(*texts: list[int]) -> PromptLookup:
    """One text in each slot."""
    lookup = PromptLookup(len(texts), 600)
    for slot, token_ids in enumerate(texts):
        lookup.append(slot, token_ids)
    return lookup


def found(lookup: PromptLookup, num_candidates: int, slot: int = 0) -> list[int]:
    found_RK, matches_RK = lookup.find(np.array([slot]), num_candidates)
    assert found_RK.shape == matches_RK.shape == (1, num_candidates)
    return found_RK[matches_RK > 0].tolist()


def continuation(token_ids: list[int], num_candidates: int) -> tuple[list[int], int]:
    """By definition: the tokens after the longest match, the latest of equal ones, and its length."""
    last = len(token_ids) - 1
    lengths = {
        place: next(
            (n for n in range(min(MAX_MATCH, place + 1)) if token_ids[place - n] != token_ids[last - n]),
            min(MAX_MATCH, place + 1),
        )
        for place in range(last)
    }
    best = max(lengths, key=lambda place: (lengths[place], place), default=0)
    if lengths.get(best, 0) < 2:
        return [], 0
    text = list(token_ids)
    for step in range(num_candidates):
        text.append(text[best + 1 + step])
    return text[len(token_ids) :], lengths[best]


def test_the_longest_latest_match_is_continued() -> None:
    """Short periods, many places with the same tokens, and long repetitions; side by side as alone."""
    rng = np.random.default_rng(3)
    texts = []
    for vocab_size, length in ((2, 300), (3, 120), (8, 200), (50, 400)):
        text = rng.integers(vocab_size, size=length).tolist()
        texts.append(text + text[length // 3 : length // 2] + [1, 2] * 3)
    lookup, begin = PromptLookup(len(texts), 600), 0
    while begin < max(map(len, texts)):
        end = begin + int(rng.integers(1, 9))
        for slot, text in enumerate(texts):
            lookup.append(slot, text[begin:end])
        begin, slots = end, rng.permutation(len(texts))
        found_RK, matches_RK = lookup.find(slots, 9)
        for slot, found_K, matches_K in zip(slots, found_RK, matches_RK, strict=True):
            expected, length = continuation(texts[slot][:end], 9)
            assert found_K[matches_K > 0].tolist() == expected
            grown = np.minimum(length + np.arange(9), MAX_MATCH) if length else np.zeros(9)
            np.testing.assert_array_equal(matches_K, grown)


def test_nothing_is_known_of_what_comes_later_or_stood_in_the_slot_before() -> None:
    lookup = lookup_of([1, 2, 3, 4, 1, 2], [7])
    assert found(lookup, 3) == [3, 4, 1]
    assert found(lookup, 2, slot=1) == []
    lookup.num_tokens[0] = 0
    assert found(lookup, 3) == []
    lookup.append(0, [1, 2])
    assert found(lookup, 3) == []  # the only place with 1, 2 is their own
    lookup.append(0, [9, 1, 2])
    assert found(lookup, 4) == [9, 1, 2, 9]
    lookup.append(0, [4, 4])
    assert found(lookup, 4) == []  # one token alone is not a match
    empty, matches = lookup.find(np.zeros(0, np.int64), 0)
    assert empty.shape == matches.shape == (0, 0)


def test_chances_fall_along_a_block_and_are_learned_by_the_length_of_a_match() -> None:
    lengths = NgramLengths(pass_of(10, 0.0))
    matches = np.array([[2, 3, 4, 5], [14, 15, 16, 16], [0, 0, 2, 3]])
    before = lengths.chances(matches)
    assert (np.diff(before[:2]) < 0).all() and (before[1] > before[0]).all()
    assert before[2, :2].tolist() == [1, 1] and before[2, 2] == before[0, 0]
    # Long matches that end; of what is certain nothing is learned.
    for _ in range(200):
        lengths.observe(np.array([14, 15, 0, 0]), np.array([True, False, True, True]))
    after = lengths.chances(matches)
    assert after[1, 0] < before[1, 0] - 0.1 and after[2, 0] == 1
    for _ in range(400):
        lengths.observe(np.arange(1, 17), np.ones(16, bool))
    assert (lengths.chances(matches)[:2] > after[:2]).all()


def pass_of(first_ms: float, token_ms: float, *, host_ms: float = 0.0) -> CostModel:
    """A pass takes ``first_ms``, and ``token_ms`` more for every token beyond one of each sequence."""
    times = [round(ms * MS) for ms in (first_ms, first_ms, first_ms + 90 * token_ms)]
    return CostModel(
        Curve([1, NUM_ROWS, NUM_ROWS + 90], times), Curve([1], [0]), message=Curve([1], [round(host_ms * MS)])
    )


@pytest.mark.parametrize(
    ("costs", "num_kept"),
    [
        (pass_of(10, 0.0), 5),
        # Ten tokens in ten milliseconds: a token is worth what it takes where its chance is the same number.
        (pass_of(10, 0.25), 4),
        (pass_of(10, 0.4), 2),
        (pass_of(10, 0.8), 0),
        # In rounds of twice that time, half as much.
        (pass_of(10, 0.8, host_ms=10), 2),
    ],
)
def test_a_candidate_is_verified_where_it_is_worth_the_time(costs: CostModel, num_kept: int) -> None:
    """One sequence of ten has candidates, with chances of 0.69, 0.51, 0.39, 0.31, 0.26."""
    lengths = NgramLengths(costs)
    matches_RK = np.zeros((NUM_ROWS, 5), np.int64)
    matches_RK[3] = np.arange(6, 11)
    for num_prompt_tokens in (0, 20):
        kept_R = lengths.lengths(
            matches_RK,
            np.where(np.arange(NUM_ROWS) == 3, 5, 0),
            num_prompt_tokens=num_prompt_tokens,
            num_context=0.0,
        )
        assert kept_R.tolist() == [0, 0, 0, num_kept, *[0] * 6]
    nothing_R = np.zeros(NUM_ROWS, np.int64)
    assert not lengths.lengths(matches_RK, nothing_R, num_prompt_tokens=0, num_context=0.0).any()
