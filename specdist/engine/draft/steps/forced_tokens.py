"""The draft loop of a run with masks: tokens that are the only ones allowed are candidates without a pass.

The distribution of a forced token is known without logits: all mass is on it. The target verifies it like any
other candidate. The draft's cache takes it in with the line's next pass.

A policy decides about drawn tokens: those that are forced before and after them come on top, up to what the
request has room for. In a reply they stand also after candidates that were drafted ahead, and alone where the
model has drafted nothing.

R lines (draft slots) to draft for, A of them that are still drafting, T forced tokens of several lines.
"""

from __future__ import annotations

import itertools

import numpy as np

from specdist.engine.draft.steps.draft_features import UNKNOWN
from specdist.engine.draft.steps.draft_loop import DraftLoop
from specdist.engine.draft.steps.draft_steps import DraftBatch, DrawnTokens
from specdist.sampling.uploads import upload
from specdist.utils.ranges import places_from

# Of a token that is certain: entropy, and the probabilities of it and of the likeliest one.
CERTAIN_FEATURES = np.array([[0.0], [1.0], [1.0]])


class ForcingDraftLoop(DraftLoop):
    """Extends sequences like a :class:`DraftLoop`, by the same tokens, and by those that are forced. With a
    trained head it runs forced tokens too: their passes give its estimates."""

    @property
    def adds_forced(self) -> bool:
        """Whether they are candidates without a pass."""
        return self._head is None

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        if self._head is not None:
            return super().extend(draft_batch)
        assert self._pipeline is not None
        state, lines_R, tails_R = self._draft_state, draft_batch.draft_slots_R, draft_batch.tails_R
        drawable_R, num_drafted_R = self.num_wanted(draft_batch), np.zeros(len(lines_R), np.int64)
        most_R = drawable_R if draft_batch.most_R is None else draft_batch.most_R
        most_R = np.where(self._is_last(state.token_ids[lines_R, tails_R - 1]), 0, most_R)
        uniforms_DR = self._uniforms(lines_R, tails_R, int(most_R.max(initial=0)))
        drawn: list[DrawnTokens] = []
        active_A, last = np.arange(len(lines_R)), None
        for num_drawn in itertools.count():
            active_A = active_A[num_drafted_R[active_A] < most_R[active_A]]
            self._add_forced(lines_R, tails_R, active_A, most_R, num_drafted_R, drawn)
            # All that are left have drawn as many.
            keep_A = (num_drafted_R[active_A] < most_R[active_A]) & (num_drawn < drawable_R[active_A])
            active_A = active_A[keep_A]
            if last is not None:
                last = last.select(np.isin(last.active_A, active_A, assume_unique=True))
            if draft_batch.uses_policy and len(active_A):
                keep_A = self._answer(draft_batch, active_A, num_drawn, last and self._told(last))
                active_A, last = active_A[keep_A], last and last.select(keep_A)
            if not len(active_A):
                break
            depths_A = num_drafted_R[active_A]
            places = lines_R[active_A], tails_R[active_A] + depths_A
            logits_AV, _ = self._forward(*places, None)
            state.num_computed[places[0]] = places[1]
            uniforms_A = None
            if uniforms_DR is not None:
                uniforms_A = uniforms_DR[upload(uniforms_DR.device, depths_A, active_A)]
            last = self._draw(logits_AV, active_A, places, uniforms_A)
            state.is_forced[places] = False
            drawn.append(last.tokens(0)._replace(depths_T=depths_A))
            num_drafted_R[active_A] += 1
            is_end_A = self.is_stop_V[last.drawn_A.numpy()] | ~(last.probabilities_A.numpy() > 0)
            most_R[active_A[is_end_A]] = 0
        if drawn:
            self._write(lines_R, tails_R, num_drafted_R, drawn)
            state.num_computed[lines_R] = np.minimum(state.num_computed[lines_R], tails_R + num_drafted_R)
        self.pass_counts.count_drafted(num_drafted_R)
        return num_drafted_R

    def add_forced(self, draft_slots_R: np.ndarray, tails_R: np.ndarray, most_R: np.ndarray) -> np.ndarray:
        """Put at most so many of them from each ``tails`` position on. Returns their numbers [R]."""
        num_added_R, drawn = np.zeros_like(most_R), list[DrawnTokens]()
        is_last_R = self._is_last(self._draft_state.token_ids[draft_slots_R, tails_R - 1])
        active_A = np.flatnonzero(~is_last_R & (most_R > 0))
        if len(active_A):
            self._add_forced(draft_slots_R, tails_R, active_A, most_R.copy(), num_added_R, drawn)
            if drawn:
                self._write(draft_slots_R, tails_R, num_added_R, drawn)
        self.pass_counts.count_drafted(num_added_R)
        return num_added_R

    def _add_forced(
        self,
        lines_R: np.ndarray,
        tails_R: np.ndarray,
        active_A: np.ndarray,
        most_R: np.ndarray,
        num_drafted_R: np.ndarray,
        drawn: list[DrawnTokens],
    ) -> None:
        """Put the forced tokens after what has been drafted, and nothing after a stop token."""
        assert self._pipeline is not None
        state, depths_A = self._draft_state, num_drafted_R[active_A]
        lines_A, begins_A = lines_R[active_A], tails_R[active_A] + depths_A
        runs = self._pipeline.forced(lines_A, begins_A, most_R[active_A] - depths_A)
        counts_A = np.array([len(run) for run in runs], np.int64)
        if not counts_A.any():
            return
        index_T, depths_T = places_from(active_A, depths_A, counts_A)
        ids_T = np.array([token_id for run in runs for token_id in run], np.int64)
        places_T = places_from(lines_A, begins_A, counts_A)
        state.put_certain(places_T, ids_T)
        state.is_forced[places_T] = state.has_forced = True
        features_3T = np.repeat(CERTAIN_FEATURES, len(ids_T), axis=1) if self._draws.keeps_features else None
        if features_3T is not None:
            state.features.keep_estimates(places_T, UNKNOWN)
        drawn.append(DrawnTokens(index_T, depths_T, ids_T, np.ones(len(ids_T)), features_3T))
        num_drafted_R[active_A] += counts_A
        most_R[index_T[self.is_stop_V[ids_T]]] = 0
        self.pass_counts.count_forced(len(ids_T))
