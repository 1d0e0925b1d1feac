"""What the draft keeps of every sequence, on the host, except the scores that it drew from.

Draft slots are the sequences' slots, and after them those of branches
(:mod:`specdist.engine.draft.ahead.branches`).

A draft slots, R sequences, T tokens, W positions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdist.engine.draft.steps.draft_features import TokenFeatures
from specdist.engine.draft.steps.draft_scores import StepScores
from specdist.models.passes.flat import FlatBatch
from specdist.sampling.random import RandomKeys
from specdist.utils.ranges import places_from


class DraftState:
    """State by slot."""

    def __init__(
        self, *, num_slots: int, num_branches: int, max_length: int, vocab_size: int, device: torch.device
    ) -> None:
        """``num_branches``: per slot."""
        # By slot: tokens committed, candidates after them, and tokens drafted ahead after those.
        self.num_committed, self.num_candidates, self.num_ahead = np.zeros((3, num_slots), np.int64)
        self.max_lengths, self.context_lengths = np.zeros((2, num_slots), np.int64)
        # By draft slot: tokens that the cache has, and what keys the random numbers. On a *miss* what was
        # drafted is dropped; only then is a position drafted again.
        num_draft_slots = num_slots * (1 + num_branches)
        self.num_computed, self.stream_keys, self.num_misses = np.zeros((3, num_draft_slots), np.int64)
        # By draft slot and position: committed and drafted tokens, and the probabilities, features and scores
        # with which the draft drew them. Memory that is never written costs nothing.
        self.token_ids = np.zeros((num_draft_slots, max_length), np.int64)
        self.probabilities = np.zeros((num_draft_slots, max_length))
        # Of drafted tokens: whether no other was allowed; and whether any ever was.
        self.is_forced, self.has_forced = np.zeros((num_draft_slots, max_length), bool), False
        self.features = TokenFeatures(num_draft_slots, max_length)
        self.scores = StepScores(num_draft_slots, max_length, vocab_size, device)
        # Of these slots, in a pass of its own, if contexts are put off.
        self.run_late_contexts: Callable[[np.ndarray], None] | None = None

    def put_undrafted(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """Tokens that the draft did not draw: context, next tokens, and the first tokens of branches."""
        self.token_ids[places] = token_ids_T
        self.features.forget(places)

    def copy_prefixes(self, slots_B: np.ndarray, draft_slots_B: np.ndarray, ends_B: np.ndarray) -> None:
        """Let branches have their sequences' tokens, up to where they begin."""
        for slot, draft_slot, end in zip(slots_B, draft_slots_B, ends_B, strict=True):
            self.token_ids[draft_slot, :end] = self.token_ids[slot, :end]

    def copy_drafted(
        self, sources: tuple[np.ndarray, np.ndarray], targets: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Let the targets have what was drafted at the sources."""
        for numbers in (self.token_ids, self.probabilities, self.is_forced):
            numbers[targets] = numbers[sources]
        self.features.copy(sources, targets)
        self.scores.copy(sources, targets)

    def num_free(self, slots_R: np.ndarray, num_tokens_R: np.ndarray) -> np.ndarray:
        """[R]: of the first tokens after each sequence's committed ones, those that were not forced."""
        if not self.has_forced:
            return num_tokens_R
        places = places_from(slots_R, self.num_committed[slots_R], num_tokens_R)
        lines_C = np.repeat(np.arange(len(slots_R)), num_tokens_R)
        return num_tokens_R - np.bincount(lines_C, self.is_forced[places], len(slots_R)).astype(np.int64)

    def num_with_free(self, slots_R: np.ndarray, num_tokens_R: np.ndarray, most_free: int) -> np.ndarray:
        """[R]: the most of these first tokens that have no more than ``most_free`` that were not forced."""
        if not self.has_forced:
            return np.minimum(num_tokens_R, most_free)
        places = places_from(slots_R, self.num_committed[slots_R], num_tokens_R)
        lines_C = np.repeat(np.arange(len(slots_R)), num_tokens_R)
        sums_C = np.cumsum(~self.is_forced[places])
        before_R = np.r_[0, sums_C][np.cumsum(num_tokens_R) - num_tokens_R]
        return np.bincount(lines_C[sums_C - before_R[lines_C] <= most_free], minlength=len(slots_R))

    def put_certain(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """Candidates that were not drawn."""
        self.put_undrafted(places, token_ids_T)
        self.probabilities[places], self.is_forced[places] = 1, False
        self.scores.keep_certain(places, token_ids_T)

    def catch_up(self, draft_slots_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        """The tokens before each position that the cache lacks, and the index of each slot's last one.

        The last token of a context that was run without logits is run once more.
        """
        if self.run_late_contexts is not None:
            self.run_late_contexts(draft_slots_A)
        begins_A = np.minimum(self.num_computed[draft_slots_A], positions_A - 1)
        slots_T, positions_T = places_from(draft_slots_A, begins_A, positions_A - begins_A)
        batch = FlatBatch(self.token_ids[slots_T, positions_T], slots_T, positions_T)
        return batch, np.cumsum(positions_A - begins_A) - 1

    def random_keys(self, slots_W: np.ndarray, positions_W: np.ndarray) -> RandomKeys:
        """Of the random numbers that decide the tokens at these positions."""
        return RandomKeys(self.stream_keys[slots_W], positions_W, self.num_misses[slots_W])
