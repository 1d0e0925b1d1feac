"""Completions that end in a loop: in several copies of the same few tokens. No tensors."""

from __future__ import annotations

from functools import cache

# Of one copy, at most.
MOST_TOKENS = 64
# Of all copies together, at least: an indentation, a line of dashes or an empty row of a table is several
# copies of a token or two as well, and the text goes on after it.
LEAST_COVERED = 64


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


def num_kept_of_loop(num_tokens: int, size: int, num_copies: int) -> int:
    """Of tokens that end in a loop of copies of this size: those until the end of its first copy."""
    return num_tokens - _covered(num_copies, size) + size


def _covered(num_copies: int, size: int) -> int:
    return max(num_copies * size, LEAST_COVERED)


@cache
def _tokens_of_new_loop(num_copies: int, most: int) -> int:
    """Tokens that a loop still takes of which there is the first copy, or ``most`` tokens of it."""
    return min(_covered(num_copies, size) - min(size, most) for size in range(1, MOST_TOKENS + 1))
