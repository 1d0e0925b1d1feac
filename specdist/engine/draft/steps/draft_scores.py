"""The scores that drafted tokens were drawn from, as each drafting step left them on the device.

S draft slots that a step drew for, W of them that are looked up, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdist.sampling.uploads import upload

# In the place of a position without scores.
NOWHERE = -1
# In entries without scores, and in those of certain tokens; steps are counted from 1.
NO_STEP = 0
CERTAIN = -1


class StepScores:
    """One matrix per drafting step; for every draft slot and position, its step and its line in that matrix.

    Scores are probabilities where the residual or a random draw needs them, else whatever the draw is the
    largest of: see :class:`specdist.sampling.branch_estimates.DraftDistributions`.
    """

    def __init__(self, num_draft_slots: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._step_of = np.zeros((num_draft_slots, max_length), np.int64)
        self._line_of = np.zeros((num_draft_slots, max_length), np.int32)
        self._steps: dict[int, Tensor] = {}
        self._next = NO_STEP + 1

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def keep(self, draft_slots_S: np.ndarray, positions_S: np.ndarray, scores_SV: Tensor) -> None:
        """Keep, without a copy, the scores that these slots' tokens were drawn from."""
        self._steps[self._next] = scores_SV
        self._step_of[draft_slots_S, positions_S] = self._next
        self._line_of[draft_slots_S, positions_S] = np.arange(len(draft_slots_S))
        self._next += 1

    def keep_certain(self, places: tuple[np.ndarray, np.ndarray], token_ids_T: np.ndarray) -> None:
        """These tokens were not drawn: the distribution of each has all mass on it."""
        self._step_of[places] = CERTAIN
        self._line_of[places] = token_ids_T

    def at(self, draft_slots_W: np.ndarray, positions_W: np.ndarray, *, certainty: float = 1.0) -> Tensor:
        """[W, V]: the scores kept at these positions; zeros where a position is ``NOWHERE``. A certain token
        has the score ``certainty``, all others 0."""
        steps_W = np.where(positions_W == NOWHERE, NO_STEP, self._step_of[draft_slots_W, positions_W])
        lines_W = self._line_of[draft_slots_W, positions_W].astype(np.int64)
        found = np.flatnonzero(steps_W > NO_STEP)
        found = found[np.argsort(steps_W[found], kind="stable")]
        steps, num_found = np.unique(steps_W[found], return_counts=True)
        # By a few operations, whatever the number of steps: a device is given each of them one by one.
        places_W, index_W = upload(self._device, found, lines_W[found])
        parts = zip(steps.tolist(), index_W.split(num_found.tolist()), strict=True)
        rows = [self._steps[step].index_select(0, lines) for step, lines in parts]
        if len(found) == len(steps_W) and rows:
            return torch.cat(rows).float()[places_W.argsort()]
        scores_WV = torch.zeros(len(draft_slots_W), self._vocab_size, device=self._device)
        if rows:
            scores_WV[places_W] = torch.cat(rows).float()
        certain = np.flatnonzero(steps_W == CERTAIN)
        if len(certain):
            scores_WV[upload(self._device, certain, lines_W[certain])] = certainty
        return scores_WV

    def forget_but(self, places: tuple[np.ndarray, np.ndarray]) -> None:
        """Drop all scores except those of these tokens, which are still to be verified."""
        needed = set(np.unique(self._step_of[places]).tolist()) if len(places[0]) else set()
        self._steps = {step: scores for step, scores in self._steps.items() if step in needed}

    def forget(self) -> None:
        """Drop all scores."""
        self._steps = {}

    def copy(self, sources: tuple[np.ndarray, np.ndarray], targets: tuple[np.ndarray, np.ndarray]) -> None:
        """Let the targets have the scores of the sources."""
        self._step_of[targets] = self._step_of[sources]
        self._line_of[targets] = self._line_of[sources]
