"""The draft loop of a device, for policies that look at every token: the device is never left without work.

Whether a sequence goes on after a token follows from the token's features. They are copied to the host while
the device runs the next step, which is therefore given to it before the answer is known; a sequence that
stops is left out of the step after that. What the steps beyond its end have drawn is dropped unseen: no
decision depends on it, so the block is the one that a loop without lookahead drafts.

R draft slots to draft for, A of them that a step draws for.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdist.engine.draft_loop import DraftBatch, DraftLoop, at_depth
from specdist.engine.draft_steps import DrawnTokens, Step, columns_of, tokens_of
from specdist.models.staging import Event

# Steps beyond the last one whose tokens the policy has seen. One is enough to keep the device at work. With
# as many as a block may have, the host waits once, but a round costs the steps of the longest block possible.
NUM_STEPS_AHEAD = 1


class _Coming(NamedTuple):
    """A step whose results are on their way to the host."""

    step: Step
    depth: int
    columns: Tensor
    arrived: Event

    @staticmethod
    def of(step: Step, depth: int, arrived: Event) -> _Coming:
        # Torch takes pinned memory for a copy that does not block.
        columns = columns_of([step]).to("cpu", non_blocking=True)
        arrived.record()
        return _Coming(step, depth, columns, arrived)

    @property
    def tokens(self) -> DrawnTokens:
        """To be asked for after the arrival."""
        return tokens_of([self.step], self.columns.numpy(), first_depth=self.depth)


class LookaheadDraftLoop(DraftLoop):
    """Extends sequences like a :class:`DraftLoop`, by the same tokens."""

    def extend(self, draft_batch: DraftBatch) -> np.ndarray:
        """Policies without features need no lookahead; a trained head's estimates are not waited for here."""
        if not (draft_batch.uses_policy and self._policy.uses_features) or self._head is not None:
            return super().extend(draft_batch)
        draft_slots_R, tails_R = draft_batch.draft_slots_R, draft_batch.tails_R
        num_wanted_R = self._num_wanted(draft_batch)
        num_drafted_R = np.zeros(len(draft_slots_R), np.int64)
        uniforms_DR = self._uniforms(draft_slots_R, tails_R, int(num_wanted_R.max(initial=0)))
        num_computed_R = self._draft_state.num_computed[draft_slots_R]
        goes_on_R = self._answers(draft_batch, num_wanted_R > 0, 0, None)
        coming: deque[_Coming] = deque()
        seen: list[DrawnTokens] = []
        last: Step | None = None
        active_A = np.arange(len(draft_slots_R))
        for depth in range(int(num_wanted_R.max(initial=0)) + 1):
            keep_A = goes_on_R[active_A] & (num_wanted_R[active_A] > depth)
            active_A = active_A[keep_A]
            if len(active_A):
                last = last and last.select(keep_A)
                positions_A = tails_R[active_A] + depth
                logits_AV, _ = self._pass(draft_slots_R[active_A], positions_A, last)
                num_computed_R[active_A] = positions_A
                places = draft_slots_R[active_A], positions_A
                last = self._draw(logits_AV, active_A, places, at_depth(uniforms_DR, depth, active_A))
                coming.append(_Coming.of(last, depth, self._runner.new_event()))
            elif coming:
                coming[-1].arrived.synchronize()
            while coming and goes_on_R.any() and (len(coming) > NUM_STEPS_AHEAD or not len(active_A)):
                if len(active_A):
                    coming[0].arrived.synchronize()
                tokens = coming.popleft().tokens.select(goes_on_R)
                seen.append(tokens)
                num_drafted_R[tokens.index_T] += 1
                wants_R = goes_on_R & (num_wanted_R > num_drafted_R)
                wants_R[tokens.index_T[self.is_stop_V[tokens.token_ids_T]]] = False
                goes_on_R = self._answers(draft_batch, wants_R, len(seen), tokens)
            if not goes_on_R.any():
                break
        if seen:
            self._write(draft_slots_R, tails_R, num_drafted_R, seen)
            num_computed_R = np.minimum(num_computed_R, tails_R + num_drafted_R)
            self._draft_state.num_computed[draft_slots_R] = num_computed_R
        self.pass_counts.count_drafted(num_drafted_R)
        return num_drafted_R

    def _answers(
        self, draft_batch: DraftBatch, asked_R: np.ndarray, depth: int, tokens: DrawnTokens | None
    ) -> np.ndarray:
        """bool [R]: which of those asked go on after their ``tokens``."""
        goes_on_R = asked_R.copy()
        if asked_R.any():
            index_A = np.flatnonzero(asked_R)
            last = None if tokens is None else tokens.select(asked_R).as_step()
            goes_on_R[index_A] = self._wants_more(draft_batch, index_A, depth, last)
        return goes_on_R
