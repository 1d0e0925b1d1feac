"""Constraints over tokens: which tokens may come next after those that a sequence has.

Everything is a function of the tokens alone, so a state that is lost is replayed, and one that has gone too
far is rolled back. M positions, W words of 32 bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

# An optional package: imported where it is used.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 32
# The word of a position without a constraint, and of one that no matching tokens lead to.
EVERYTHING = -1
# Compiled grammars that are kept: rows with constraints of their own may be many.
MAX_GRAMMARS = 1024


def masks_of_everything(num_positions: int, vocab_size: int) -> np.ndarray:
    """int32 [M, W]: every token is allowed."""
    return np.full((num_positions, -(-vocab_size // WORD_BITS)), EVERYTHING, np.int32)


def set_only(mask_W: np.ndarray, token_id: int) -> None:
    """Allow this token alone."""
    mask_W[:] = 0
    mask_W[token_id // WORD_BITS] = _bit_of(token_id)


def forbid(mask_W: np.ndarray, token_id: int) -> None:
    """Allow this token no longer."""
    mask_W[token_id // WORD_BITS] &= ~_bit_of(token_id)


def _bit_of(token_id: int) -> np.ndarray:
    """int32 []: in its word."""
    return np.array(1 << token_id % WORD_BITS, np.uint32).view(np.int32)


def only_tokens(masks_MW: np.ndarray) -> np.ndarray:
    """int64 [M]: the token id of a mask that allows a single one; -1 of any other."""
    is_used_MW = masks_MW != 0
    first_M = is_used_MW.argmax(axis=1)
    words_M = masks_MW[np.arange(len(masks_MW)), first_M].view(np.uint32)
    is_single_M = (is_used_MW.sum(axis=1) == 1) & (words_M & (words_M - np.uint32(1)) == 0)
    bits_M = np.log2(np.maximum(words_M, 1)).astype(np.int64)
    return np.where(is_single_M, first_M * WORD_BITS + bits_M, -1)


class Matcher:
    """Follows the completion of one sequence, wherever it goes."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.library_matcher = matcher
        self._followed: list[int] = []
        # The mask of the next token, if it has been made for these tokens.
        self.mask_W: np.ndarray | None = None

    def follow(self, token_ids: list[int]) -> bool:
        """Go to the state after these tokens, from the beginning of the completion; none is a stop token.

        Returns whether they are the beginning of a completion that the grammar allows.
        """
        followed = self._followed
        if token_ids == followed:
            return True
        num_same = len(followed)
        if token_ids[:num_same] != followed:
            pairs = enumerate(zip(followed, token_ids, strict=False))
            num_same = next((i for i, (old, new) in pairs if old != new), min(num_same, len(token_ids)))
            self._go_back(num_same)
        added = token_ids[num_same:]
        num_added = self.library_matcher.try_consume_tokens(added) if added else 0
        self._followed = token_ids[: num_same + num_added]
        self.mask_W = None
        return num_added == len(added)

    def _go_back(self, num_tokens: int) -> None:
        if not self.library_matcher.rollback(len(self._followed) - num_tokens):
            self.library_matcher.reset()
            self.library_matcher.try_consume_tokens(self._followed[:num_tokens])

    @property
    def has_failed(self) -> bool:
        """The grammar's limits are exceeded: it can say nothing more."""
        return bool(self.library_matcher.is_error())


class Grammars:
    """Compiled grammars over one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        import llguidance.numpy

        self._library = llguidance
        self._executor = llguidance.LLExecutor()
        self._tokenizer = tokenizer
        # Of each grammar a matcher that has followed nothing.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """A new one for a grammar that has been checked."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy())

    def fill(self, masks_MW: np.ndarray, places: Sequence[tuple[Matcher, int, list[int]]]) -> None:
        """Write masks of several sequences: which tokens may come next.

        Args:
            masks_MW: int32; bit v of a row is token v.
            places: of each sequence the matcher, which stays where it is, the row of its first mask, and
                candidates; the rows after the first are for the tokens after each candidate. After a
                candidate that the grammar does not allow they are left as they are.
        """
        single, several = [], []
        for matcher, row, candidates in places:
            if candidates:
                several.append((matcher.library_matcher, row, candidates))
            elif matcher.mask_W is None:
                single.append((matcher.library_matcher, row))
        if single:
            self._library.numpy.fill_next_token_bitmask_par(self._executor, single, masks_MW)
        if several:
            fill = self._library.numpy.fill_next_token_bitmask_par_with_draft_tokens
            fill(self._executor, several, masks_MW)
        for matcher, row, candidates in places:
            if matcher.mask_W is None:
                matcher.mask_W = masks_MW[row].copy()
            else:
                masks_MW[row] = matcher.mask_W
            if matcher.has_failed:
                # No token: the sequence ends with an error, and never goes on without its constraint.
                masks_MW[row : row + len(candidates) + 1] = 0


def grammars_of(tokenizer: object, *, vocab_size: int, stop_token_ids: Collection[int]) -> Grammars:
    """Over a fast tokenizer's vocabulary. Raises ValueError for another tokenizer.

    Args:
        vocab_size: ids that can be drawn; ids without a token are never allowed.
        stop_token_ids: allowed where a completion may end, and nowhere else.
    """
    from llguidance.hf import from_tokenizer

    ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
    num_ids = -(-vocab_size // WORD_BITS) * WORD_BITS
    return Grammars(from_tokenizer(tokenizer, n_vocab=num_ids, eos_token=ids))
