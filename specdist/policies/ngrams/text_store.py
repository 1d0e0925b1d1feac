"""Tokens of other texts whose n-grams are looked up: a ring of fixed size, whose oldest are overwritten.

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


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What is looked through besides a sequence's own text: at most ``num_tokens`` of these texts and, if
    ``adds_sequences``, of what other sequences have said."""

    num_tokens: int = 0
    given: Sequence[np.ndarray] = ()
    adds_sequences: bool = False


NO_TEXTS = TextSettings()


class TextStore:
    """Texts, each after a token -1; position p lies at p % capacity. ``earlier`` of a token -1 after a full
    block is where the text goes on."""

    def __init__(self, num_tokens: int, library: ctypes.CDLL) -> None:
        """``num_tokens``: most that are kept. ``library``: that of ``ngrams.c``, which adds and looks up."""
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
        self._library.add_text(ctypes.addressof(self.arguments), len(text), text.ctypes.data)
