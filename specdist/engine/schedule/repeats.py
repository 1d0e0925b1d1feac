"""Completions that end in a loop: in several copies of the same few tokens. No tensors."""

from __future__ import annotations

from functools import cache

from specdist.engine.request import Sequence

# Of one copy, at most.
MOST_TOKENS = 64
# Of all copies together, at least: an indentation, a line of dashes or an empty row of a table is several
# copies of a token or two as well, and the text goes on after it.
LEAST_COVERED = 64


def num_until_loop(sequence: Sequence, new_ids: list[int], num_copies: int) -> int | None:
    """How many new tokens there are up to the first with which a loop ends, wherever their blocks end. There
    was none before."""
    num_before = len(sequence.token_ids)
    end = max(sequence.loops_from, num_before + 1)
    if end > num_before + len(new_ids):
        return None
    begin = max(sequence.num_prompt_tokens, num_before - num_copies * MOST_TOKENS)
    tail, found = sequence.token_ids[begin:] + new_ids, None
    while found is None and end <= num_before + len(new_ids):
        num_missing, _ = tokens_to_loop(tail[: end - begin], num_copies)
        found = None if num_missing else end - num_before
        end += num_missing
    sequence.loops_from = end
    return found


def tokens_to_loop(token_ids: list[int], num_copies: int) -> tuple[int, int]:
    """How many tokens, at least, come after these until a loop ends; 0 where these end in one, and then the
    tokens of a copy. A loop: ``num_copies`` copies or more of 1 to 64 tokens, which have 64 or more in all.

    No loop ends before, whatever the tokens are, so that nothing need be looked at until then: in most texts
    for about 64 - 64 / ``num_copies`` tokens. The last ``num_copies`` * 64 tokens decide.
    """
    end = len(token_ids)
    num_missing, size = _tokens_of_new_loop(num_copies, min(end, MOST_TOKENS)), 0
    before = token_ids[-2 : -2 - MOST_TOKENS : -1]
    for _ in range(before.count(token_ids[-1])):
        size = before.index(token_ids[-1], size) + 1
        # Tokens after the first copy equal those a copy before them. So many are compared with which this
        # loop would end before the others.
        num_needed = _covered(num_copies, size) - size
        begin = end - (num_needed - num_missing + 1)
        if (
            begin < size
            or token_ids[begin] != token_ids[begin - size]
            or token_ids[begin:] != token_ids[begin - size : end - size]
        ):
            continue
        while begin > max(size, end - num_needed) and token_ids[begin - 1] == token_ids[begin - 1 - size]:
            begin -= 1
        num_missing = num_needed - (end - begin)
        if not num_missing:
            return 0, size
    return num_missing, 0


def cut_loop(sequence: Sequence, repeats: int) -> None:
    """Take the copies of a loop that has ended a completion back, but the first, if ``repeats`` says so."""
    if sequence.finish_reason == "repetition" and repeats < 0:
        _, size = tokens_to_loop(sequence.token_ids[sequence.num_prompt_tokens :], -repeats)
        del sequence.token_ids[size - _covered(-repeats, size) :]


def _covered(num_copies: int, size: int) -> int:
    return max(num_copies * size, LEAST_COVERED)


@cache
def _tokens_of_new_loop(num_copies: int, most: int) -> int:
    """Tokens that a loop still takes of which there is the first copy, or ``most`` tokens of it."""
    return min(_covered(num_copies, size) - min(size, most) for size in range(1, MOST_TOKENS + 1))
