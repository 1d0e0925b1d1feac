"""The draft loop of a run with masks: a token that is the only one allowed is a candidate without a pass.

Its distribution is known without logits: all mass is on it. The target verifies it like any other candidate.
The draft's cache takes it in with the line's next pass, so several forced tokens cost no pass at all.

R lines (draft slots) to draft for, A of them that are still drafting, F of them whose next token is free, V
vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdist.constraints.matcher import only_tokens
from specdist.engine.draft_loop import DraftBatch, DraftLoop
from specdist.engine.draft_steps import Step


class ForcingDraftLoop(DraftLoop):
    """Extends sequences like a :class:`DraftLoop`, by the same tokens. With a trained head it runs forced
    tokens too: their passes give its estimates."""

    # By line: the tokens that the cache has, while a batch is being drafted.
    _num_computed: np.ndarray

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        state, lines_R = self._draft_state, draft_batch.draft_slots_R
        self._num_computed = state.num_computed.copy()
        num_drafted_R = super().extend(draft_batch)
        if self._head is None:
            ends_R = draft_batch.tails_R + num_drafted_R
            state.num_computed[lines_R] = np.minimum(self._num_computed[lines_R], ends_R)
        return num_drafted_R

    def _forward(
        self, draft_slots_A: np.ndarray, positions_A: np.ndarray, last: Step | None
    ) -> tuple[Tensor, Tensor | None]:
        """As of :class:`DraftLoop`; of a forced token any logits, since its mask leaves one of them."""
        if self._head is not None:
            return super()._forward(draft_slots_A, positions_A, last)
        assert self._pipeline is not None
        masks_AW = self._pipeline.masks_of_lines(draft_slots_A, positions_A)
        is_free_A = np.ones(len(positions_A), bool) if masks_AW is None else only_tokens(masks_AW) < 0
        free = np.flatnonzero(is_free_A)
        self.pass_counts.count_forced(len(positions_A) - len(free))
        device, num_ids = self._runner.device, len(self.is_stop_V)
        if not len(free):
            return torch.zeros(len(positions_A), num_ids, device=device), None
        lines_F, positions_F = draft_slots_A[free], positions_A[free]
        self._draft_state.num_computed[lines_F] = self._num_computed[lines_F]
        batch, index_F = self._catch_up(lines_F, positions_F)
        self._num_computed[lines_F] = positions_F
        self.pass_counts.count(len(batch), len(index_F))
        logits_FV = self._runner.forward(batch, index_F)[:, :num_ids]
        if len(free) == len(positions_A):
            return logits_FV, None
        logits_AV = logits_FV.new_zeros(len(positions_A), num_ids)
        return logits_AV.index_copy(0, torch.from_numpy(free).to(device), logits_FV), None
