"""Tokens that are the only ones allowed: candidates without a pass.

The distribution of a forced token is known without logits: all mass is on it. The target verifies it like any
other candidate. The draft's cache takes it in with the line's next pass.

A policy decides about drawn tokens: those that are forced before and after them come on top, up to what the
request has room for. In a reply they stand also after candidates that were drafted ahead, and alone where the
model has drafted nothing.

A lines (draft slots), T forced tokens of several lines.
"""

from __future__ import annotations

import numpy as np

from specdist.engine.draft.steps.draft_state import DraftState
from specdist.engine.draft.steps.draft_steps import Drafting
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.times.reports import PassCounts
from specdist.utils.ranges import places_from

# The features of a token that is certain: entropy, and the probabilities of it and of the likeliest one.
CERTAIN_FEATURES = np.array([[0.0], [1.0], [1.0]])


class ForcedTokens:
    """Puts forced tokens after what has been drafted."""

    def __init__(
        self,
        pipeline: LogitsPipeline,
        draft_state: DraftState,
        is_stop_V: np.ndarray,
        pass_counts: PassCounts,
    ) -> None:
        self._pipeline, self._draft_state = pipeline, draft_state
        self._is_stop_V, self._pass_counts = is_stop_V, pass_counts

    def add(
        self, lines_A: np.ndarray, begins_A: np.ndarray, limits_A: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put those that are forced from ``begins`` on, before ``limits``, and nothing after a stop token.
        Returns how many [A], and where there is a stop token [A]."""
        state, is_over_A = self._draft_state, np.zeros(len(lines_A), bool)
        runs = self._pipeline.forced(lines_A, begins_A, limits_A - begins_A)
        counts_A = np.array([len(run) for run in runs], np.int64)
        if not counts_A.any():
            return counts_A, is_over_A
        for index, run in enumerate(runs):
            ends = np.flatnonzero(self._is_stop_V[run])
            if len(ends):
                counts_A[index], is_over_A[index] = ends[0] + 1, True
        ids_T = np.array(
            [token_id for run, count in zip(runs, counts_A, strict=True) for token_id in run[:count]]
        )
        places_T = places_from(lines_A, begins_A, counts_A)
        state.put_certain(places_T, ids_T)
        if state.features.are_kept:
            state.features.keep(places_T, np.repeat(CERTAIN_FEATURES, len(ids_T), axis=1))
        self._pass_counts.count_forced(len(ids_T))
        return counts_A, is_over_A

    def extend(self, drafting: Drafting, index_A: np.ndarray) -> None:
        """Put them after what these sequences have so far; the next step's pass has to run them, too."""
        ends_A, limits_A = drafting.ends_R[index_A], drafting.limits_R[index_A]
        counts_A, is_over_A = self.add(drafting.batch.draft_slots_R[index_A], ends_A, limits_A)
        drafting.begins_R[index_A] += counts_A
        is_over_A |= ends_A + counts_A >= limits_A
        drafting.shorten(index_A[is_over_A], np.full(int(is_over_A.sum()), drafting.num_steps))
        drafting.last_step = None

    def after(self, lines_R: np.ndarray, tails_R: np.ndarray, most_R: np.ndarray) -> np.ndarray:
        """Put at most so many of them from each ``tails`` position on, as candidates. Returns their numbers
        [R]."""
        num_added_R = np.zeros_like(most_R)
        last_ids_R = self._draft_state.token_ids[lines_R, tails_R - 1]
        active_A = np.flatnonzero((most_R > 0) & (last_ids_R >= 0) & ~self._is_stop_V[last_ids_R])
        if len(active_A):
            begins_A = tails_R[active_A]
            num_added_R[active_A], _ = self.add(lines_R[active_A], begins_A, begins_A + most_R[active_A])
        self._pass_counts.count_drafted(num_added_R)
        return num_added_R
