"""What a sequence's own earlier tokens say about its next ones: prompt lookup with learned chances.

After every token the index looks up the latest earlier places of the sequence that end in the same two
tokens, and takes the one with the longest match, the latest of equal ones. The tokens after that place are
the proposal; where it reaches the end of the text it goes on with its own beginning, as a repetition does.
(Prompt lookup: Saxena 2023; longest match: SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975.)

The *chance* of a token is estimated from this sequence alone: how often the token after a match of this
length was the right one so far, whether it was proposed or not, beside a prior. A match grows with every
token that is right, so the chance that a token and all before it are right is a product over growing lengths.

All of it is a function of the sequence's tokens and the length of its prompt, and of nothing else: not of the
other rows, the blocks, or a preemption.

R rows, C tokens of all of them, one after the other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from specdist.drafters import plain_ngrams
from specdist.drafters.ngram_state import (
    CLASS_STARTS,
    MAX_MATCH,
    MAX_PLACES,
    NUM_HEAD_BITS,
    PRIOR_TOKENS,
    NgramState,
)
from specdist.kernels import cpu_library


@dataclass(frozen=True)
class Proposals:
    """Tokens to verify, row after row.

    Attributes:
        token_ids_C, lengths_R: int64; of a row without a match, none.
        chances_C: float64, estimated probability that a token and all before it are right.
        match_lengths_R: tokens before the proposal that stood before its source too.
    """

    token_ids_C: np.ndarray
    chances_C: np.ndarray
    lengths_R: np.ndarray
    match_lengths_R: np.ndarray


class NgramIndex:
    """One index for each slot."""

    def __init__(self, *, num_slots: int, max_length: int, is_compiled: bool | None = None) -> None:
        """``max_length``: most tokens of a sequence. ``is_compiled``: default: where it can be."""
        self._state = NgramState(num_slots, max_length)
        self._library = None if is_compiled is False else _library(is_needed=bool(is_compiled))
        state = self._state
        self._arguments = cpu_library.Ngrams(
            state.tokens.shape[1], NUM_HEAD_BITS, len(CLASS_STARTS), MAX_MATCH, MAX_PLACES,
            state.class_of.ctypes.data, state.prior_right.ctypes.data, PRIOR_TOKENS,
            *(array.ctypes.data for array in (
                state.tokens, state.earlier, state.heads, state.num_tokens, state.num_prompt_tokens,
                state.match_places, state.match_lengths, state.num_right, state.num_tried,
            )),
        )  # fmt: skip

    def begin(self, slots: np.ndarray, num_prompt_tokens: np.ndarray) -> None:
        """New sequences in these slots, of which no token is known yet."""
        self._state.begin(slots, num_prompt_tokens)

    def num_tokens(self, slots_R: np.ndarray) -> np.ndarray:
        """[R]: how many tokens of each sequence are known."""
        return self._state.num_tokens[slots_R]

    def append(self, slots_R: np.ndarray, counts_R: np.ndarray, token_ids_C: np.ndarray) -> None:
        """The next tokens of these sequences, ``counts_R`` of each."""
        assert (self._state.num_tokens[slots_R] + counts_R).max(initial=0) <= self._state.tokens.shape[1]
        tokens_C = token_ids_C.astype(np.int32)
        if self._library is None:
            plain_ngrams.append_tokens(self._state, slots_R, counts_R, tokens_C)
            return
        arrays = (slots_R, counts_R, tokens_C)
        self._library.append_tokens(
            ctypes.addressof(self._arguments), len(slots_R), *(array.ctypes.data for array in arrays)
        )

    def propose(self, slots_R: np.ndarray, limits_R: np.ndarray, *, least_chance: float = 0.0) -> Proposals:
        """At most ``limits_R`` tokens for each, as long as a token's chance is at least ``least_chance``."""
        match_lengths_R = self._state.match_lengths[slots_R]
        if self._library is None:
            found = plain_ngrams.propose_tokens(self._state, slots_R, limits_R, least_chance)
            return Proposals(*found, match_lengths_R)
        most = int(limits_R.sum())
        token_ids, chances, lengths_R = np.empty(most, np.int64), np.empty(most), np.empty_like(slots_R)
        arrays = [array.ctypes.data for array in (slots_R, limits_R, token_ids, chances, lengths_R)]
        num = self._library.propose_tokens(
            ctypes.addressof(self._arguments), len(slots_R), *arrays[:2], least_chance, *arrays[2:]
        )
        return Proposals(token_ids[:num], chances[:num], lengths_R, match_lengths_R)


def _library(*, is_needed: bool) -> ctypes.CDLL | None:
    try:
        return cpu_library.ngrams_library()
    except cpu_library.NOT_COMPILED:
        if is_needed:
            raise
        return None
