"""What the draft keeps of every sequence: tokens, the probability and features of each, and the scores that
it was drawn from.

A row here is a row of the draft's page table: a slot with its sequence, or one of the slot's *branches*,
which are numbered after the slots. Code that drafts treats both alike.

A rows that are drafting, S rows that a step drew for, T tokens, W rows that are looked up, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdist.models.flat import FlatBatch
from specdist.policies import NUM_FEATURES, DraftFeatures
from specdist.sampling.random import RandomKeys
from specdist.utils.ranges import arange_segments

NOWHERE = -1
# In entries without scores; steps are counted from 1.
NO_STEP = 0
# Index of a token's last feature, a trained head's estimate: it comes with the pass over the token, the other
# features with its draw.
ESTIMATE = 3
UNKNOWN = np.nan


class DraftState:
    """State per row, and per row and position. All of it is on the host except the scores."""

    def __init__(self, *, num_rows: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        # By position: tokens committed, drafted or run. Memory that is never written costs nothing.
        self.token_ids = np.zeros((num_rows, max_length), np.int64)
        # The probability with which each drafted token was drawn.
        self.probabilities = np.zeros((num_rows, max_length))
        # The fields of DraftFeatures, of drafted tokens and only if a policy or a trace uses them.
        self._features = np.zeros((NUM_FEATURES, num_rows, max_length), np.float32)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.stream_keys = np.zeros(num_rows, np.int64)
        # Chains dropped so far. A position is drafted again only after a chain was dropped, so this count
        # keys the random numbers: a chain drafted ahead is the same as one drafted later, after a preemption.
        self.num_misses = np.zeros(num_rows, np.int64)
        self._scores = _StepScores(num_rows, max_length, vocab_size, device)

    def catch_up(self, rows_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        """The tokens before each position that the cache lacks, and the index of each row's last one.

        The last token of a context that was run without logits is run once more.
        """
        begins_A = np.minimum(self.num_computed[rows_A], positions_A - 1)
        lengths_A = positions_A - begins_A
        rows_T = np.repeat(rows_A, lengths_A)
        positions_T = np.repeat(begins_A, lengths_A) + arange_segments(lengths_A)
        batch = FlatBatch(self.token_ids[rows_T, positions_T], rows_T, positions_T)
        return batch, np.cumsum(lengths_A) - 1

    def random_keys(self, rows_W: np.ndarray, positions_W: np.ndarray) -> RandomKeys:
        """Of the random numbers that decide the tokens at these positions."""
        return RandomKeys(self.stream_keys[rows_W], positions_W, self.num_misses[rows_W])

    def keep_scores(self, rows_S: np.ndarray, positions_S: np.ndarray, scores_SV: Tensor) -> None:
        """Keep, without a copy, the scores or probabilities that these rows' tokens were drawn from."""
        self._scores.append(rows_S, positions_S, scores_SV)

    def scores_at(self, rows_W: np.ndarray, positions_W: np.ndarray) -> Tensor:
        """[W, V]: each row's kept scores at a position; zeros where the position is ``NOWHERE``."""
        return self._scores.at(rows_W, positions_W)

    def put_undrafted(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """Tokens that the draft did not draw: context, next tokens, and the first tokens of branches."""
        self.token_ids[places] = token_ids_T
        self._features[:, places[0], places[1]] = UNKNOWN

    def is_drafted(self, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Which tokens the draft has drawn; known only if features are kept."""
        return ~np.isnan(self._features[0, places[0], places[1]])

    def keep_features(self, places: tuple[np.ndarray, np.ndarray], features_3T: np.ndarray) -> None:
        """All features but the estimate, of the tokens drawn at these rows and positions."""
        self._features[:ESTIMATE, places[0], places[1]] = features_3T

    def keep_estimates(self, places: tuple[np.ndarray, np.ndarray], estimates_T: np.ndarray | float) -> None:
        """A head's estimates of tokens that were drawn before, or ``UNKNOWN``."""
        self._features[ESTIMATE, places[0], places[1]] = estimates_T

    def features_at(self, places: tuple[np.ndarray, np.ndarray]) -> DraftFeatures:
        return DraftFeatures(*self.feature_rows_at(places).astype(np.float64))

    def feature_rows_at(self, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """float32 [4, T], as stored."""
        return self._features[:, places[0], places[1]]

    def forget_scores_but(self, places: tuple[np.ndarray, np.ndarray]) -> None:
        """Drop all scores except those of tokens that are still to be verified."""
        self._scores.forget_but(places)

    def adopt(self, branches_W: np.ndarray, slots_W: np.ndarray, begins_W: np.ndarray, lengths_W: np.ndarray
              ) -> None:  # fmt: skip
        """A slot takes over ``lengths`` tokens of a branch, from position ``begins`` on."""
        columns_T = np.repeat(begins_W, lengths_W) + arange_segments(lengths_W)
        sources = np.repeat(branches_W, lengths_W), columns_T
        targets = np.repeat(slots_W, lengths_W), columns_T
        self.token_ids[targets] = self.token_ids[sources]
        self.probabilities[targets] = self.probabilities[sources]
        self._features[:, targets[0], targets[1]] = self._features[:, sources[0], sources[1]]
        self._scores.adopt(sources, targets)


class Chains:
    """How far each slot's sequence has come, and how many tokens its chain has after the committed ones."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_committed = np.zeros(num_slots, np.int64)
        # The candidates that the target verifies, and after them the tokens drafted ahead.
        self.num_candidates = np.zeros(num_slots, np.int64)
        self.num_ahead = np.zeros(num_slots, np.int64)
        self.max_lengths = np.zeros(num_slots, np.int64)
        self.context_lengths = np.zeros(num_slots, np.int64)

    @staticmethod
    def places(
        slots_S: np.ndarray, begins_S: np.ndarray, lengths_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slot and position of every token of ``lengths`` tokens from ``begins`` on; an index into the
        state."""
        return np.repeat(slots_S, lengths_S), np.repeat(begins_S, lengths_S) + arange_segments(lengths_S)


class _StepScores:
    """One matrix per drafting step, and for every row and position its step and its line in that matrix."""

    def __init__(self, num_rows: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._step_of = np.zeros((num_rows, max_length), np.int64)
        self._line_of = np.zeros((num_rows, max_length), np.int32)
        self._steps: dict[int, Tensor] = {}
        self._next = NO_STEP + 1

    def append(self, rows_S: np.ndarray, positions_S: np.ndarray, scores_SV: Tensor) -> None:
        self._steps[self._next] = scores_SV
        self._step_of[rows_S, positions_S] = self._next
        self._line_of[rows_S, positions_S] = np.arange(len(rows_S))
        self._next += 1

    def forget_but(self, places: tuple[np.ndarray, np.ndarray]) -> None:
        needed = set(np.unique(self._step_of[places]).tolist())
        self._steps = {step: scores for step, scores in self._steps.items() if step in needed}

    def at(self, rows_W: np.ndarray, positions_W: np.ndarray) -> Tensor:
        steps_W = np.where(positions_W == NOWHERE, NO_STEP, self._step_of[rows_W, positions_W])
        lines_W = self._line_of[rows_W, positions_W].astype(np.int64)
        scores_WV = torch.zeros(len(rows_W), self._vocab_size, device=self._device)
        for step in np.unique(steps_W[steps_W != NO_STEP]).tolist():
            found_W = np.flatnonzero(steps_W == step)
            lines_V = self._steps[step][torch.from_numpy(lines_W[found_W]).to(self._device)]
            scores_WV[torch.from_numpy(found_W).to(self._device)] = lines_V.float()
        return scores_WV

    def adopt(self, sources: tuple[np.ndarray, np.ndarray], targets: tuple[np.ndarray, np.ndarray]) -> None:
        self._step_of[targets] = self._step_of[sources]
        self._line_of[targets] = self._line_of[sources]
