"""What the draft holds for every row: tokens, the probability of each, and the scores that it was drawn from.

A row is a slot of the batch, or one of the slot's *branches*: rows of the draft's alone, numbered after the
slots, in which it prepares for the likeliest misses. Both are the same to everything that drafts.

S rows that a step drew for, W rows that are looked up, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdist.models.flat import FlatBatch, arange_segments
from specdist.policies import DraftFeatures

NOWHERE = -1
# What an untouched entry says: steps are counted from 1.
NO_STEP = 0
# Of each token; the last of them comes with the pass over it, the others with its draw.
NUM_FEATURES = 4
ESTIMATE = 3
UNKNOWN = np.nan


class DraftState:
    """State per row, and per row and position. All of it is on the host but for the scores."""

    def __init__(self, *, num_rows: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        # By position: what was run, committed or drafted; untouched memory costs nothing.
        self.token_ids = np.zeros((num_rows, max_length), np.int64)
        # The probability with which each drafted token was drawn.
        self.probabilities = np.zeros((num_rows, max_length))
        # Of each drafted token, where somebody uses them: the fields of DraftFeatures. Of others unknown.
        self._features = np.zeros((NUM_FEATURES, num_rows, max_length), np.float32)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.stream_keys = np.zeros(num_rows, np.int64)
        # Chains dropped so far. A position is drafted again only after one was, so this keys its random
        # numbers: a chain drafted ahead and the same chain drafted later, after a preemption, are the same.
        self.num_misses = np.zeros(num_rows, np.int64)
        self._scores = _StepScores(num_rows, max_length, vocab_size, device)

    def catch_up(self, rows_A: np.ndarray, positions_A: np.ndarray) -> tuple[FlatBatch, np.ndarray]:
        """What the cache lacks before each position, and where each row's last token stands in it.

        After a context that was run without logits its last token is run once more.
        """
        begins_A = np.minimum(self.num_computed[rows_A], positions_A - 1)
        lengths_A = positions_A - begins_A
        rows_T = np.repeat(rows_A, lengths_A)
        positions_T = np.repeat(begins_A, lengths_A) + arange_segments(lengths_A)
        batch = FlatBatch(self.token_ids[rows_T, positions_T], rows_T, positions_T)
        return batch, np.cumsum(lengths_A) - 1

    def keep_scores(self, rows_S: np.ndarray, positions_S: np.ndarray, scores_SV: Tensor) -> None:
        """Remember what these rows' tokens were drawn from: weights or probabilities, without a copy."""
        self._scores.append(rows_S, positions_S, scores_SV)

    def scores_at(self, rows_W: np.ndarray, positions_W: np.ndarray) -> Tensor:
        """[W, V]: each row's kept scores at a position; zeros where the position is ``NOWHERE``."""
        return self._scores.at(rows_W, positions_W)

    def put_undrafted(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """Tokens that the draft did not draw: of a context, next tokens, and what branches begin with."""
        self.token_ids[places] = token_ids_T
        self._features[:, places[0], places[1]] = UNKNOWN

    def is_drafted(self, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Which tokens the draft has drawn, as far as features are kept."""
        return ~np.isnan(self._features[0, places[0], places[1]])

    def keep_features(self, places: tuple[np.ndarray, np.ndarray], features_3T: np.ndarray) -> None:
        """Remember what is known of the tokens that were drawn at these rows and positions."""
        self._features[:ESTIMATE, places[0], places[1]] = features_3T

    def keep_estimates(self, places: tuple[np.ndarray, np.ndarray], estimates_T: np.ndarray | float) -> None:
        """A head's, of tokens that were drawn before, or ``UNKNOWN``."""
        self._features[ESTIMATE, places[0], places[1]] = estimates_T

    def features_at(self, places: tuple[np.ndarray, np.ndarray]) -> DraftFeatures:
        return DraftFeatures(*self.feature_rows_at(places).astype(np.float64))

    def feature_rows_at(self, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """float32 [4, T], as it is kept."""
        return self._features[:, places[0], places[1]]

    def forget_scores_but(self, places: tuple[np.ndarray, np.ndarray]) -> None:
        """A round is resolved: only tokens at these rows and positions are still to be verified."""
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


class _StepScores:
    """One matrix per drafting step, and for every row and position the step and its line there."""

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
