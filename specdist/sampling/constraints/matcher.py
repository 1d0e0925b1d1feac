"""Constraints over tokens: which tokens may come next after those that a sequence has.

Everything is a function of the tokens alone, so a state that is lost is replayed, and one that has gone too
far is rolled back. M positions, W words of 32 bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdist.sampling.constraints.constraint import reason_of

# An optional package: imported where it is used.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 32
# The word of a position without a constraint, and of one that no matching tokens lead to.
EVERYTHING = -1
# Compiled grammars that are kept: rows with constraints of their own may be many.
MAX_GRAMMARS = 1024
# Masks that a matcher keeps: those of a few blocks.
MAX_MASKS = 128
# Sequences that a matcher follows one after another: what it has learned needs memory.
MAX_SEQUENCES = 64
# The number of sequences from which on masks are made by several threads, which take longer to wake than a
# few masks to make.
MIN_PARALLEL = 16


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
    """Follows the completion of one sequence after another, wherever each goes.

    What a grammar has been asked for makes it faster, so a sequence gets the matcher of an earlier one of the
    same grammar. Masks are known until the tokens before them change: where both sides of a round are in one
    process, the target finds those that the draft has asked for.
    """

    def __init__(self, unused: LLMatcher, num_words: int) -> None:
        """``unused``: has followed nothing, and is left as it is. ``num_words``: of a mask."""
        self._unused, self._num_words = unused, num_words
        self._renew()

    def _renew(self) -> None:
        self.library_matcher = self._unused.deep_copy()
        self._num_sequences = 1
        self._followed: list[int] = []
        # Masks, or the only token that there is, by the number of tokens before them.
        self._known: dict[int, np.ndarray | int] = {}

    def begin(self) -> None:
        """Another sequence."""
        self._num_sequences += 1
        if self._num_sequences > MAX_SEQUENCES or self.has_failed:
            self._renew()

    def follow(self, token_ids: list[int]) -> bool:
        """Go to the state after these tokens, from the beginning of the completion; none is a stop token.

        Returns whether they are the beginning of a completion that the grammar allows.
        """
        if not self.has_failed and (token_ids == self._followed or self._goes_to(token_ids)):
            return True
        if self._num_sequences == 1 or not self.has_failed:
            return False
        # A limit of llguidance, perhaps for what earlier sequences have asked for.
        self._renew()
        return self._goes_to(token_ids)

    def _goes_to(self, token_ids: list[int]) -> bool:
        num_same = self._num_same(token_ids)
        if num_same < len(self._followed):
            self._go_back(num_same)
        added = token_ids[num_same:]
        num_added = self.library_matcher.try_consume_tokens(added) if added else 0
        self._followed = token_ids[: num_same + num_added]
        return num_added == len(added)

    def _num_same(self, token_ids: list[int]) -> int:
        """The tokens that have been followed and are the beginning of these."""
        followed = self._followed
        if token_ids[: len(followed)] == followed:
            return len(followed)
        pairs = enumerate(zip(followed, token_ids, strict=False))
        return next((i for i, (old, new) in pairs if old != new), min(len(followed), len(token_ids)))

    def _go_back(self, num_tokens: int) -> None:
        if not self.library_matcher.rollback(len(self._followed) - num_tokens):
            self.library_matcher.reset()
            self.library_matcher.try_consume_tokens(self._followed[:num_tokens])
        self._known = {before: mask for before, mask in self._known.items() if before <= num_tokens}

    def forced_after(self, token_ids: list[int]) -> list[int]:
        """Tokens that follow these for certain, one after the other: no other is allowed; or a stop token.
        There may be more after them."""
        if not self.follow(token_ids):
            return []
        forced: list[int] = self.library_matcher.compute_ff_tokens()
        num_before = len(token_ids)
        if forced:
            if not self.follow([*token_ids, *forced]):
                return []
            self._keep(dict(enumerate(forced, num_before)))
        elif self.library_matcher.is_accepting():
            mask_W = self._known.get(num_before)
            if mask_W is None:
                mask_W = np.zeros(self._num_words, np.int32)
                self._compute(mask_W)
                self._keep({num_before: mask_W})
            if isinstance(mask_W, int):
                return [mask_W]
            (token_id,) = only_tokens(mask_W[None]).tolist()
            forced = [token_id] if token_id >= 0 else []
        return forced

    def fill_known(self, masks_MW: np.ndarray, token_ids: list[int], num_before: int) -> int:
        """Write the masks that are known, from the one after ``num_before`` of the tokens on, up to the first
        that is not. Returns their number."""
        end = min(self._num_same(token_ids), len(token_ids))
        for place in range(num_before, end + 1):
            mask_W = self._known.get(place)
            if mask_W is None:
                return place - num_before
            if isinstance(mask_W, int):
                set_only(masks_MW[place - num_before], mask_W)
            else:
                masks_MW[place - num_before] = mask_W
        return max(0, end + 1 - num_before)

    def fill(self, masks_MW: np.ndarray, candidates: list[int]) -> None:
        """Write the masks of the next token, and of those after each of these candidates; after one that is
        not allowed they are left as they are."""
        self._compute(masks_MW[0])
        num_consumed = 0
        while num_consumed < len(candidates):
            if not self.library_matcher.try_consume_tokens(candidates[num_consumed : num_consumed + 1]):
                break
            num_consumed += 1
            self._compute(masks_MW[num_consumed])
        if num_consumed:
            self.library_matcher.rollback(num_consumed)

    def keep_next(self, mask_W: np.ndarray) -> None:
        """This is the mask of the next token."""
        self._keep({len(self._followed): mask_W.copy()})

    def _keep(self, masks: Mapping[int, np.ndarray | int]) -> None:
        self._known.update(masks)
        while len(self._known) > MAX_MASKS:
            del self._known[min(self._known)]

    def _compute(self, mask_W: np.ndarray) -> None:
        self.library_matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)

    @property
    def has_failed(self) -> bool:
        """The grammar's limits are exceeded: it can say nothing more."""
        return bool(self.library_matcher.is_error())

    @property
    def failure(self) -> str | None:
        """Why it :attr:`has_failed`."""
        return reason_of(self.library_matcher.get_error()) if self.has_failed else None


class Grammars:
    """Compiled grammars over one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        import llguidance.numpy

        self._num_words = -(-tokenizer.vocab_size // WORD_BITS)
        self._library = llguidance
        self._executor = llguidance.LLExecutor()
        self._tokenizer = tokenizer
        # A matcher of each grammar that has followed nothing.
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
        return Matcher(compiled, self._num_words)

    def fill(self, masks_MW: np.ndarray, places: Sequence[tuple[Matcher, int, list[int], int]]) -> None:
        """Write masks of several sequences: which tokens may come next.

        Args:
            masks_MW: int32; bit v of a row is token v.
            places: of each sequence the matcher, the row of its first mask, tokens, and how many of these are
                before that mask; the rows after the first are for the tokens after each of the others, which
                are candidates. After a candidate that the grammar does not allow they are left as they are.
        """
        asked: list[tuple[Matcher, int, list[int]]] = []
        befores: list[list[int]] = []
        for matcher, row, token_ids, num_before in places:
            end = row + len(token_ids) - num_before + 1
            num_known = matcher.fill_known(masks_MW[row:end], token_ids, num_before)
            if row + num_known == end:
                continue
            if matcher.follow(before := token_ids[: num_before + num_known]):
                befores.append(before)
                asked.append((matcher, row + num_known, token_ids[num_before + num_known :]))
            elif not num_known or matcher.has_failed:
                # Only after logits that are not finite, or beyond llguidance's limits: an error.
                masks_MW[row:end] = 0
        if len(asked) < MIN_PARALLEL:
            for matcher, row, candidates in asked:
                matcher.fill(masks_MW[row:], candidates)
        else:
            self._fill_in_parallel(masks_MW, asked)
        for (matcher, row, candidates), before in zip(asked, befores, strict=True):
            if matcher.has_failed and matcher.follow(before):
                # It has begun anew.
                matcher.fill(masks_MW[row:], candidates)
            if matcher.has_failed:
                # No token: the sequence ends with an error, and never goes on without its constraint.
                masks_MW[row : row + len(candidates) + 1] = 0
            else:
                matcher.keep_next(masks_MW[row])

    def _fill_in_parallel(self, masks_MW: np.ndarray, asked: list[tuple[Matcher, int, list[int]]]) -> None:
        library, executor = self._library.numpy, self._executor
        blocks = [(each.library_matcher, row, candidates) for each, row, candidates in asked if candidates]
        if blocks:
            library.fill_next_token_bitmask_par_with_draft_tokens(executor, blocks, masks_MW)
        single = [(each.library_matcher, row) for each, row, candidates in asked if not candidates]
        if single:
            library.fill_next_token_bitmask_par(executor, single, masks_MW)


def grammars_of(tokenizer: object, *, vocab_size: int, stop_token_ids: Collection[int]) -> Grammars:
    """Grammars over a fast tokenizer's vocabulary. Raises ValueError for another tokenizer.

    Args:
        vocab_size: ids that can be drawn; ids without a token are never allowed.
        stop_token_ids: allowed where a completion may end, and nowhere else.
    """
    from llguidance.hf import from_tokenizer

    ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
    num_ids = -(-vocab_size // WORD_BITS) * WORD_BITS
    return Grammars(from_tokenizer(tokenizer, n_vocab=num_ids, eos_token=ids))
