"""The arrays of :mod:`specdist.policies.ngrams.ngram_index`, which ``kernels/ngrams.c`` works on."""

from __future__ import annotations

import numpy as np

from specdist.policies.ngrams.text_store import TextStore

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


class NgramState:
    """The arrays of the index, by slot. Memory that is never written is never used."""

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
