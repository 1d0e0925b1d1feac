"""Tokens of other texts that memory looks through: a ring of fixed size, the oldest of which are overwritten.

Places that end in the same four tokens are chained, the latest first, so that a look-up reads at most
``MAX_PLACES`` of them. For each token 8 bytes for its chain, 4 for itself and 4 for whose it is, and 8 to 16
for the table's heads.

A sequence that runs adds its tokens as they are committed, to blocks of its own: other sequences, samples of
the same prompt above all, find them at once, and it does not find them itself. Each block begins with the
sequence's last tokens before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdist.kernels import cpu_library

NO_TOKEN = -1
GRAM = 4
# Of a running sequence: places of a block, one before and one after its tokens, and tokens that are repeated.
BLOCK, OVERLAP = 64, 8
MULTIPLIER, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What memory looks through besides a sequence's own text: at most ``num_tokens`` of these texts and, if
    ``adds_sequences``, of what other sequences have said."""

    num_tokens: int = 0
    given: Sequence[np.ndarray] = ()
    adds_sequences: bool = False


NO_TEXTS = TextSettings()


class TextStore:
    """Texts, each after a ``NO_TOKEN``; position p lies at p % capacity. ``earlier`` of a ``NO_TOKEN`` after
    a full block is where the text goes on."""

    def __init__(self, num_tokens: int, library: ctypes.CDLL | None) -> None:
        """``num_tokens``: most that are kept. ``library``: the compiled one, if there is any."""
        self.capacity = num_tokens
        self.num_head_bits = max(10, (num_tokens - 1).bit_length())
        self.count = np.zeros(1, np.int64)
        self.tokens = np.empty(num_tokens, np.int32)
        # The sequence that a token is of; 0 of a text that was given.
        self.owners = np.zeros(num_tokens, np.int32)
        self.earlier = np.empty(num_tokens, np.int64)
        self.heads = np.full(1 << self.num_head_bits, -1)
        self._library = library
        arrays = (self.count, self.tokens, self.owners, self.earlier, self.heads)
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
            self._put(place, token, 0)
            if index + 1 >= GRAM:
                self._chain(place, text[: index + 1])

    def add_token(self, tokens: np.ndarray, tail: int, owner: int) -> int:
        """The last of a running sequence's tokens. ``tail``: where its text goes on, or -1; returns where it
        goes on after this one."""
        overlap = min(OVERLAP, len(tokens) - 1)
        place = tail
        if tail < 0 or not self.is_kept(tail) or tail % BLOCK == BLOCK - 1:
            begin = -(-int(self.count[0]) // BLOCK) * BLOCK
            for empty in range(int(self.count[0]), begin + BLOCK):
                self._put(empty, NO_TOKEN, owner)
            self.count[0] = begin + BLOCK
            place = begin + 1 + overlap
            for back in range(overlap, 0, -1):
                self._put(place - back, int(tokens[-1 - back]), owner)
            if tail >= 0 and self.is_kept(tail):
                self.earlier[tail % self.capacity] = place
            elif len(tokens) > GRAM:
                # What the first tokens come after: the end of the prompt.
                self._chain(place - 1, tokens[:-1])
        self._put(place, int(tokens[-1]), owner)
        if len(tokens) >= GRAM:
            self._chain(place, tokens)
        return place + 1

    def _put(self, place: int, token: int, owner: int) -> None:
        self.tokens[place % self.capacity] = token
        self.owners[place % self.capacity] = owner
        self.earlier[place % self.capacity] = -1

    def _chain(self, place: int, tokens: np.ndarray) -> None:
        head = self.head_of(tokens[-GRAM:])
        self.earlier[place % self.capacity] = self.heads[head]
        self.heads[head] = place

    def token_at(self, place: int) -> int:
        return int(self.tokens[place % self.capacity])

    def is_kept(self, place: int) -> bool:
        return place > self.count[0] - self.capacity

    def next_place(self, place: int) -> int:
        """Where the text goes on after a place, or -1."""
        place += 1
        if place >= self.count[0]:
            return -1
        if self.token_at(place) == NO_TOKEN:
            place = int(self.earlier[place % self.capacity])
        return place if place >= 0 and self.is_kept(place) else -1

    def text_after(self, place: int, limit: int) -> np.ndarray:
        """At most so many tokens of the text that goes on after a place."""
        found: list[int] = []
        place = self.next_place(place) if self.is_kept(place) else -1
        while place >= 0 and len(found) < limit:
            found.append(self.token_at(place))
            place = self.next_place(place)
        return np.array(found, np.int64)

    def head_of(self, gram: np.ndarray) -> int:
        """The index of a gram's chain."""
        word = 0
        for token in gram.tolist():
            word = ((word ^ (token & 0xFFFFFFFF)) * MULTIPLIER) & WORD
        return word >> (64 - self.num_head_bits)

    def longest_match(
        self, tokens: np.ndarray, max_match: int, max_places: int, owner: int
    ) -> tuple[int, int]:
        """Place and length of the longest match of the last of these tokens in others' texts, the latest of
        equal ones; (-1, 0) where there is none."""
        best_place, best_length, num_places = -1, 0, 0
        place = int(self.heads[self.head_of(tokens[-GRAM:])]) if len(tokens) >= GRAM else -1
        first = int(self.count[0]) - self.capacity + max_match
        while place >= max(0, first) and num_places < max_places:
            longest, length = min(max_match, len(tokens), place + 1), 0
            while length < longest and self.token_at(place - length) == tokens[-1 - length]:
                length += 1
            num_places += length >= GRAM
            if self.owners[place % self.capacity] != owner:
                if length >= GRAM and length > best_length and self.next_place(place) >= 0:
                    best_place, best_length = place, length
                if length == max_match:
                    break
            place = int(self.earlier[place % self.capacity])
        return best_place, best_length
