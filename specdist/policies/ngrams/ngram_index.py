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

from specdist.kernels import cpu_library
from specdist.policies.ngrams.text_store import NO_TEXTS, TextSettings, TextStore
from specdist.utils.ranges import arange_segments

MAX_MATCH = 32
MAX_PLACES = 64
# Lengths of a match that are counted together: each class begins at one of these.
CLASS_STARTS = (0, 3, 4, 6, 9, 17)
# Share of right tokens in each class before anything is known, and how many tokens that counts for.
PRIOR_RATES = (0.3, 0.45, 0.6, 0.75, 0.85, 0.95)
PRIOR_TOKENS = 4.0
# The weight of these shares where all sequences learn together, and how many tokens are remembered.
TOGETHER_TOKENS, TOGETHER_MEMORY = 32.0, 4096
# Of the table of a sequence's bigrams.
NUM_HEAD_BITS = 12
# In the place of a number of tokens.
ALL = -1


@dataclass(frozen=True)
class Proposals:
    """Tokens to verify, row after row.

    Attributes:
        token_ids_C, lengths_R: int64; of a row without a match, none.
        chances_C: float64, estimated probability that a token and all before it are right.
    """

    token_ids_C: np.ndarray
    chances_C: np.ndarray
    lengths_R: np.ndarray

    def until(self, is_last_C: np.ndarray) -> Proposals:
        """Each without what would follow its first token that is a last one."""
        if not is_last_C.any():
            return self
        kept_R = self.lengths_R.copy()
        np.minimum.at(kept_R, self._lines_C[is_last_C], arange_segments(self.lengths_R)[is_last_C] + 1)
        return self.first(kept_R)

    def first(self, lengths_R: np.ndarray) -> Proposals:
        """The first tokens of each, at most as many as there are."""
        kept_R = np.minimum(lengths_R, self.lengths_R)
        if kept_R.sum() == len(self.token_ids_C):
            return self
        is_kept_C = arange_segments(self.lengths_R) < kept_R.repeat(self.lengths_R)
        return Proposals(self.token_ids_C[is_kept_C], self.chances_C[is_kept_C], kept_R)

    def instead(self, is_other_R: np.ndarray, other: Proposals) -> Proposals:
        """With the other's proposals for some rows."""
        if not is_other_R.any():
            return self
        is_mine_C, is_other_C = ~is_other_R[self._lines_C], is_other_R[other._lines_C]
        order = np.argsort(np.r_[self._lines_C[is_mine_C], other._lines_C[is_other_C]], kind="stable")
        return Proposals(
            np.r_[self.token_ids_C[is_mine_C], other.token_ids_C[is_other_C]][order],
            np.r_[self.chances_C[is_mine_C], other.chances_C[is_other_C]][order],
            np.where(is_other_R, other.lengths_R, self.lengths_R),
        )

    @property
    def _lines_C(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths_R)), self.lengths_R)


class NgramState:
    """The arrays of the index, by slot, which ``kernels/ngrams.c`` works on. Memory that is never written is
    never used."""

    def __init__(self, num_slots: int, capacity: int, *, adds_sequences: bool) -> None:
        self.class_of = np.searchsorted(CLASS_STARTS, np.arange(MAX_MATCH + 1), side="right") - 1
        # Of the sequence's own text, then of the store.
        rates = np.array(2 * PRIOR_RATES)
        self.prior_right = rates * PRIOR_TOKENS
        # Right and tried in each class, of all sequences.
        self.together = np.stack([rates, np.ones(len(rates))]) * TOGETHER_TOKENS
        self.tokens = np.empty((num_slots, capacity), np.int32)
        self.earlier = np.empty((num_slots, capacity), np.int32)
        self.heads = np.empty((num_slots, 1 << NUM_HEAD_BITS), np.int32)
        self.store: TextStore | None = None
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.match_places = np.full(num_slots, -1)
        self.match_lengths = np.zeros(num_slots, np.int64)
        self.store_places = np.full(num_slots, -1)
        self.store_lengths = np.zeros(num_slots, np.int64)
        # The store is to have a sequence's tokens after the first ``num_unstored``, as the text of its owner,
        # which goes on at the tail.
        self.adds_sequences = adds_sequences
        self.num_unstored = np.zeros(num_slots, np.int64)
        self.store_tails = np.full(num_slots, -1)
        self.owners = np.zeros(num_slots, np.int64)
        self._num_owners = 0
        self.num_right = np.zeros((num_slots, 2 * len(CLASS_STARTS)))
        self.num_tried = np.zeros((num_slots, 2 * len(CLASS_STARTS)))
        # Both, as far as all sequences have learned from them.
        self._told = np.zeros((2, num_slots, 2 * len(CLASS_STARTS)))

    def begin(self, slots: np.ndarray, num_prompt_tokens: np.ndarray, are_resumed: np.ndarray) -> None:
        """New sequences in these slots, of which no token is known yet. The store has what a resumed one said
        before it was preempted: all tokens that are appended first."""
        self.num_unstored[slots] = np.where(are_resumed, ALL, num_prompt_tokens)
        self.store_tails[slots] = -1
        self.owners[slots] = self._num_owners + 1 + np.arange(len(slots))
        self._num_owners += len(slots)
        self.num_prompt_tokens[slots] = num_prompt_tokens
        self.num_tokens[slots] = self.match_lengths[slots] = self.store_lengths[slots] = 0
        self.match_places[slots] = self.store_places[slots] = self.heads[slots] = -1
        self.num_right[slots] = self.num_tried[slots] = 0
        self._told[:, slots] = 0

    def learn_together(self, slots_R: np.ndarray) -> None:
        """Begin every chance with what all sequences have learned; these have learned more since the last
        time."""
        learned_2RC = np.stack([self.num_right[slots_R], self.num_tried[slots_R]])
        more_2C = (learned_2RC - self._told[:, slots_R]).sum(axis=1)
        self._told[:, slots_R] = learned_2RC
        self.together = self.together * 0.5 ** (more_2C[1] / TOGETHER_MEMORY) + more_2C
        self.prior_right[:] = self.together[0] / self.together[1] * PRIOR_TOKENS


class NgramIndex:
    """One index for each slot."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        learns_together: bool = False,
        texts: TextSettings = NO_TEXTS,
    ) -> None:
        """``max_length``: most tokens of a sequence. ``learns_together``: a sequence's chances begin
        with what all have learned (:meth:`learn`). ``texts``: to look through besides a sequence's own.

        Raises what :func:`specdist.kernels.cpu_library.ngrams_library` raises without a C compiler."""
        self._state = NgramState(num_slots, max_length, adds_sequences=texts.adds_sequences)
        self._learns_together = learns_together
        self._library = cpu_library.ngrams_library()
        state = self._state
        self._arguments = cpu_library.Ngrams(
            state.tokens.shape[1], NUM_HEAD_BITS, len(CLASS_STARTS), MAX_MATCH, MAX_PLACES,
            state.class_of.ctypes.data, state.prior_right.ctypes.data, PRIOR_TOKENS,
            *(array.ctypes.data for array in (
                state.tokens, state.earlier, state.heads, state.num_tokens, state.num_prompt_tokens,
                state.match_places, state.match_lengths, state.num_right, state.num_tried,
            )),
            None, state.store_places.ctypes.data, state.store_lengths.ctypes.data,
            state.num_unstored.ctypes.data, state.store_tails.ctypes.data, state.owners.ctypes.data,
            texts.adds_sequences,
        )  # fmt: skip
        if texts.num_tokens:
            state.store = TextStore(texts.num_tokens, self._library)
            self._arguments.store = ctypes.addressof(state.store.arguments)
            for token_ids in texts.given:
                state.store.add(token_ids)

    def add_text(self, token_ids: np.ndarray) -> None:
        """A text of others, which may be proposed from now on; the oldest may have to go for it."""
        assert self._state.store is not None
        self._state.store.add(token_ids)

    def begin(
        self, slots: np.ndarray, num_prompt_tokens: np.ndarray, are_resumed: np.ndarray | bool = False
    ) -> None:
        """New sequences in these slots, of which no token is known yet; or some that go on after they were
        preempted, whose texts the store has."""
        self._state.begin(slots, num_prompt_tokens, np.zeros(len(slots), bool) | are_resumed)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [slots, positions]: of every sequence, those that are known first."""
        return self._state.tokens

    def num_tokens(self, slots_R: np.ndarray) -> np.ndarray:
        """[R]: how many tokens of each sequence are known."""
        return self._state.num_tokens[slots_R]

    def append(self, slots_R: np.ndarray, counts_R: np.ndarray, token_ids_C: np.ndarray) -> None:
        """The next tokens of these sequences, ``counts_R`` of each."""
        assert (self._state.num_tokens[slots_R] + counts_R).max(initial=0) <= self._state.tokens.shape[1]
        tokens_C = token_ids_C.astype(np.int32)
        if self._state.adds_sequences:
            unstored_R = self._state.num_unstored[slots_R]
            first_R = np.maximum(counts_R, self._state.num_prompt_tokens[slots_R])
            self._state.num_unstored[slots_R] = np.where(unstored_R == ALL, first_R, unstored_R)
        arrays = (slots_R, counts_R, tokens_C)
        self._library.append_tokens(
            ctypes.addressof(self._arguments), len(slots_R), *(array.ctypes.data for array in arrays)
        )

    def learn(self, slots_R: np.ndarray) -> None:
        """From what these sequences have shown since the last time, for all, where they learn together."""
        if self._learns_together and len(slots_R):
            self._state.learn_together(slots_R)

    def propose(
        self, slots_R: np.ndarray, limits_R: np.ndarray, *, least_chance: float | np.ndarray = 0.0
    ) -> Proposals:
        """At most ``limits_R`` tokens for each, as long as a token's chance is at least ``least_chance``, one
        for all or for each."""
        least_chances_R = np.full(len(slots_R), 0.0) + least_chance
        most = int(limits_R.sum())
        token_ids, chances, lengths_R = np.empty(most, np.int64), np.empty(most), np.empty_like(slots_R)
        arrays = (slots_R, limits_R, least_chances_R, token_ids, chances, lengths_R)
        num = self._library.propose_tokens(
            ctypes.addressof(self._arguments), len(slots_R), *(array.ctypes.data for array in arrays)
        )
        return Proposals(token_ids[:num], chances[:num], lengths_R)
