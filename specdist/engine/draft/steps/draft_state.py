"""What the draft keeps of every sequence on the host, and of every step the scores that tokens were drawn
from, on the device.

Draft slots are the sequences' slots, and after them those of branches
(:mod:`specdist.engine.draft.ahead.branches`).

A draft slots, R sequences, T tokens, W positions, S draft slots that a step drew for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specdist.engine.draft.steps.draft_features import TokenFeatures
from specdist.engine.messages.opened import OpenedSequences
from specdist.models.batch.flat import FlatBatch
from specdist.sampling.random import RandomKeys
from specdist.sampling.uploads import upload
from specdist.utils.ranges import places_from

# The index of a position without scores.
NO_POSITION = -1
# The step of entries without scores, and of certain tokens; steps are counted from 1.
NO_STEP = 0
CERTAIN = -1


class StepScores:
    """One matrix per step, or run of steps; for every draft slot and position, the line of which matrix.

    Scores are probabilities where the residual or a random draw needs them, else whatever the draw is the
    largest of: see :class:`specdist.sampling.branch_estimates.DraftDistributions`.
    """

    def __init__(self, num_draft_slots: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._step_of = np.zeros((num_draft_slots, max_length), np.int64)
        self._line_of = np.zeros((num_draft_slots, max_length), np.int32)
        self._steps: dict[int, Tensor] = {}
        self._next = self._first_lent = NO_STEP + 1

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def keep(self, places_T: tuple[np.ndarray, np.ndarray], scores_MV: Tensor, lines_T: np.ndarray) -> None:
        """Keep, without a copy until :meth:`own`, the scores that tokens at these places were drawn from."""
        self._steps[self._next] = scores_MV
        self._step_of[places_T], self._line_of[places_T] = self._next, lines_T
        self._next += 1

    def own(self) -> None:
        """Copy what was kept since the last call: a run is about to overwrite the last one's scores."""
        for step in self._steps.keys() & range(self._first_lent, self._next):
            self._steps[step] = self._steps[step].clone()
        self._first_lent = self._next

    def keep_certain(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """These tokens were not drawn: the distribution of each has all mass on it."""
        self._step_of[places] = CERTAIN
        self._line_of[places] = token_ids_T

    def at(self, draft_slots_W: np.ndarray, positions_W: np.ndarray, *, certainty: float = 1.0) -> Tensor:
        """[W, V]: the scores kept at these positions; zeros where a position is ``NO_POSITION``. A certain
        token has the score ``certainty``, all others 0."""
        steps_W = np.where(positions_W == NO_POSITION, NO_STEP, self._step_of[draft_slots_W, positions_W])
        lines_W = self._line_of[draft_slots_W, positions_W].astype(np.int64)
        found = np.flatnonzero(steps_W > NO_STEP)
        found = found[np.argsort(steps_W[found], kind="stable")]
        steps, num_found = np.unique(steps_W[found], return_counts=True)
        # By a few operations, whatever the number of steps: a device is given each of them one by one.
        places_W, index_W = upload(self._device, found, lines_W[found])
        parts = zip(steps.tolist(), index_W.split(num_found.tolist()), strict=True)
        rows = [self._steps[step].index_select(0, lines) for step, lines in parts]
        scores_WV = torch.zeros(len(draft_slots_W), self._vocab_size, device=self._device)
        if rows:
            scores_WV[places_W] = torch.cat(rows).float()
        certain = np.flatnonzero(steps_W == CERTAIN)
        if len(certain):
            scores_WV[upload(self._device, certain, lines_W[certain])] = certainty
        return scores_WV

    def rows(self, draft_slots_W: np.ndarray, positions_W: np.ndarray) -> tuple[Tensor, np.ndarray | None]:
        """What :meth:`at` gives, and None; or a matrix with all of them, and their lines, -1 for zeros."""
        steps_W = np.where(positions_W == NO_POSITION, NO_STEP, self._step_of[draft_slots_W, positions_W])
        steps = np.unique(steps_W[steps_W != NO_STEP])
        if len(steps) != 1 or steps[0] == CERTAIN:
            return self.at(draft_slots_W, positions_W), None
        lines_W = np.where(steps_W == NO_STEP, -1, self._line_of[draft_slots_W, positions_W])
        return self._steps[int(steps[0])], lines_W.astype(np.int64)

    def forget_but(self, places: tuple[np.ndarray, np.ndarray]) -> None:
        """Drop all scores except those of these tokens, which are still to be verified."""
        needed = set(np.unique(self._step_of[places]).tolist()) if len(places[0]) else set()
        self._steps = {step: scores for step, scores in self._steps.items() if step in needed}

    def copy(self, sources: tuple[np.ndarray, np.ndarray], targets: tuple[np.ndarray, np.ndarray]) -> None:
        """Let the targets have the scores of the sources."""
        self._step_of[targets] = self._step_of[sources]
        self._line_of[targets] = self._line_of[sources]


class DraftState:
    """State by slot."""

    def __init__(
        self, *, num_slots: int, num_branches: int, max_length: int, vocab_size: int, device: torch.device
    ) -> None:
        """``num_branches``: per slot."""
        # Numbers by slot: tokens committed, candidates after them, and tokens drafted ahead after those.
        self.num_committed, self.num_candidates, self.num_ahead = np.zeros((3, num_slots), np.int64)
        self.max_lengths, self.context_lengths = np.zeros((2, num_slots), np.int64)
        # Numbers by draft slot: tokens that the cache has, and what keys the random numbers. On a *miss* what
        # was drafted is dropped; only then is a position drafted again.
        num_draft_slots = num_slots * (1 + num_branches)
        self.num_computed, self.stream_keys, self.num_misses = np.zeros((3, num_draft_slots), np.int64)
        # What each draft slot has at each position: committed and drafted tokens, and the probabilities,
        # features and scores with which the draft drew them. Memory that is never written costs nothing.
        self.token_ids = np.zeros((num_draft_slots, max_length), np.int64)
        self.probabilities = np.zeros((num_draft_slots, max_length))
        # Whether no other token than the drafted one was allowed; and whether that ever was so.
        self.is_forced, self.has_forced = np.zeros((num_draft_slots, max_length), bool), False
        self.features = TokenFeatures(num_draft_slots, max_length)
        self.scores = StepScores(num_draft_slots, max_length, vocab_size, device)
        # Runs the contexts of these slots, in a pass of its own, if they are put off.
        self.prefill_lazily: Callable[[np.ndarray], None] | None = None

    def put_undrafted(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """Tokens that the draft did not draw: context, next tokens, and the first tokens of branches."""
        self.token_ids[places] = token_ids_T
        self.features.forget(places)

    def open(self, opened: OpenedSequences) -> None:
        """Sequences begin."""
        self.stream_keys[opened.slots], self.num_misses[opened.slots] = opened.stream_keys, opened.num_misses
        self.max_lengths[opened.slots] = opened.max_lengths
        self.context_lengths[opened.slots] = opened.context_lengths
        self.num_candidates[opened.slots] = self.num_ahead[opened.slots] = 0

    def commit(self, batch: FlatBatch) -> None:
        """Tokens of contexts, or next tokens that the target has sampled alone, without anything drafted."""
        if len(batch):
            self.put_undrafted((batch.slots_T, batch.positions_T), np.asarray(batch.token_ids_T))
            # Positions ascend within a slot, so the last write is the largest.
            self.num_committed[batch.slots_T] = batch.positions_T + 1
            self.num_candidates[batch.slots_T] = self.num_ahead[batch.slots_T] = 0

    def forget_verified(self, slots_R: np.ndarray) -> None:
        """The scores of all tokens but those that are still to be verified."""
        if not self.scores.is_empty:
            num_left_R = self.num_candidates[slots_R] + self.num_ahead[slots_R]
            self.scores.forget_but(places_from(slots_R, self.num_committed[slots_R], num_left_R))

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
        """Candidates that were not drawn: a constraint forces them."""
        self.put_undrafted(places, token_ids_T)
        self.probabilities[places] = 1
        self.is_forced[places] = self.has_forced = True
        self.scores.keep_certain(places, token_ids_T)

    def catch_up(self, draft_slots_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        """The tokens before each position that the cache lacks, and the index of each slot's last one.

        The last token of a context that was run without logits is run once more.
        """
        if self.prefill_lazily is not None:
            self.prefill_lazily(draft_slots_A)
        begins_A = np.minimum(self.num_computed[draft_slots_A], positions_A - 1)
        slots_T, positions_T = places_from(draft_slots_A, begins_A, positions_A - begins_A)
        batch = FlatBatch(self.token_ids[slots_T, positions_T], slots_T, positions_T)
        return batch, np.cumsum(positions_A - begins_A) - 1

    def random_keys(self, slots_W: np.ndarray, positions_W: np.ndarray) -> RandomKeys:
        """Keys of the random numbers that decide the tokens at these positions."""
        return RandomKeys(self.stream_keys[slots_W], positions_W, self.num_misses[slots_W])
