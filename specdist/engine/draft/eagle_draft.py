"""The draft's side of a round with an EAGLE-3 draft, which takes turns with its target.

In a round's first step it runs again what the target has accepted, now with the target's states in the place
of its own; in the other steps the state of each drafted token is what its own step has put out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdist.engine.draft.ahead.first_ahead import FirstAhead
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.models.eagle.eagle_runner import EagleRunner


class EagleDraftWorker(DraftWorker):
    """A draft whose requests bring the states of the tokens committed since the last one."""

    _runner: EagleRunner

    def _respond(self, request: ProposalRequest) -> Callable[..., ProposalReply]:
        # Before the page table changes: they are of the last pass.
        if request.states is not None:
            self._runner.receive(*request.states.places_C, request.states.states_CS)
        self._runner.drop_waiting()
        return super()._respond(request)

    def _resolve(self, request: ProposalRequest) -> FirstAhead:
        state, slots_R = self._draft_state, request.slots_R
        begins_R = state.num_committed[slots_R]
        first = super()._resolve(request)
        # What was drafted has been run with the draft's own states.
        state.num_computed[slots_R] = np.minimum(state.num_computed[slots_R], begins_R)
        return first
