"""Tokens of other texts that memory looks through: a ring of fixed size, the oldest of which are overwritten.

Places that end in the same four tokens are chained, the latest first, so that a look-up reads at most
``MAX_PLACES`` of them. 8 bytes for each token's chain, 4 for itself, and as much again for the table's heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdist.kernels import cpu_library

NO_TOKEN = -1
GRAM = 4
MULTIPLIER, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What memory looks through besides a sequence's own text: at most ``num_tokens`` of these texts and, if
    ``adds_sequences``, of sequences that have finished."""

    num_tokens: int = 0
    given: Sequence[np.ndarray] = ()
    adds_sequences: bool = False


NO_TEXTS = TextSettings()


class TextStore:
    """Texts, each after a ``NO_TOKEN``; position p lies at p % capacity."""

    def __init__(self, num_tokens: int, library: ctypes.CDLL | None) -> None:
        """``num_tokens``: most that are kept. ``library``: the compiled one, if there is any."""
        self.capacity = num_tokens
        self.num_head_bits = max(10, (num_tokens - 1).bit_length())
        self.count = np.zeros(1, np.int64)
        self.tokens = np.empty(num_tokens, np.int32)
        self.earlier = np.empty(num_tokens, np.int64)
        self.heads = np.full(1 << self.num_head_bits, -1)
        self._library = library
        arrays = (self.count, self.tokens, self.earlier, self.heads)
        self.arguments = cpu_library.Store(
            self.capacity, self.num_head_bits, *(array.ctypes.data for array in arrays)
        )

    def add(self, token_ids: np.ndarray) -> None:
        """A text; the oldest ones may have to go. Of one that is too long, the end is kept."""
        text = np.ascontiguousarray(token_ids[-(self.capacity - 1) :], np.int32)
        if self._library is not None:
            self._library.add_text(ctypes.addressof(self.arguments), len(text), text.ctypes.data)
            return
        for index, token in enumerate([NO_TOKEN, *text.tolist()], -1):
            place = int(self.count[0])
            self.count[0] += 1
            self.tokens[place % self.capacity] = token
            self.earlier[place % self.capacity] = -1
            if index + 1 >= GRAM:
                head = self.head_of(text[index + 1 - GRAM : index + 1])
                self.earlier[place % self.capacity] = self.heads[head]
                self.heads[head] = place

    def token_at(self, place: int) -> int:
        return int(self.tokens[place % self.capacity])

    def continues(self, place: int) -> bool:
        """Whether a token of the same text stands after this place."""
        return place + 1 < self.count[0] and self.token_at(place + 1) != NO_TOKEN

    def head_of(self, gram: np.ndarray) -> int:
        """The index of a gram's chain."""
        word = 0
        for token in gram.tolist():
            word = ((word ^ (token & 0xFFFFFFFF)) * MULTIPLIER) & WORD
        return word >> (64 - self.num_head_bits)

    def longest_match(self, tokens: np.ndarray, max_match: int, max_places: int) -> tuple[int, int]:
        """Place and length of the longest match of the last of these tokens, the latest of equal ones;
        (-1, 0) where there is none."""
        best_place, best_length, num_places = -1, 0, 0
        place = int(self.heads[self.head_of(tokens[-GRAM:])]) if len(tokens) >= GRAM else -1
        first = int(self.count[0]) - self.capacity + max_match
        while place >= max(0, first) and num_places < max_places:
            longest, length = min(max_match, len(tokens), place + 1), 0
            while length < longest and self.token_at(place - length) == tokens[-1 - length]:
                length += 1
            num_places += length >= GRAM
            if length >= GRAM and length > best_length and self.continues(place):
                best_place, best_length = place, length
            if length == max_match:
                break
            place = int(self.earlier[place % self.capacity])
        return best_place, best_length
