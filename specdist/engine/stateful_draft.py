"""The proposer that adds the target's hidden states to requests, for a draft that reads them (EAGLE-3).

With a request travel the states of all tokens that the last pass has run and that are committed: of each
block the next token and the accepted candidates, and all of the contexts. They are sent after the request.

R sequences that decode, M stretches of tokens, T tokens of the last pass, C of them that are committed, S
numbers of a token's states.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specdist.engine.draft.target_states import STATE_TYPES, TargetStates
from specdist.engine.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import Timeline
from specdist.models.eagle.states import StatesRunner
from specdist.models.passes.flat import FlatBatch, Segments
from specdist.sampling.uploads import upload
from specdist.utils.ranges import arange_segments


class StatefulDraft:
    """A proposer that adds the target's states to every request."""

    def __init__(self, draft: Proposer, target: StatesRunner) -> None:
        self._draft = draft
        self._target = target
        self._num_context = 0
        target.last = None  # passes that measured times

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        request = self._with_states(request)
        self._num_context = request.num_prefill_tokens
        reply = self._draft.propose(request, clock)
        num_bytes = 0 if request.states is None else request.states.states_CS.nbytes
        return dataclasses.replace(reply, traffic=reply.traffic + Traffic(num_state_bytes=num_bytes))

    def close(self) -> None:
        self._draft.close()

    def _with_states(self, request: ProposalRequest) -> ProposalRequest:
        found, self._target.last = self._target.last, None
        if found is None:
            return request
        batch, states_TS = found
        slots_M, begins_M, starts_M, lengths_M = _committed(batch, self._num_context, request)
        if not len(slots_M):
            return request
        index_C = np.repeat(starts_M, lengths_M) + arange_segments(lengths_M)
        states = TargetStates(
            slots_M=slots_M,
            begins_M=begins_M,
            lengths_M=lengths_M,
            width=states_TS.shape[1],
            dtype=STATE_TYPES.index(states_TS.dtype),
            states_CS=states_TS[upload(states_TS.device, index_C)[0]],
        )
        return dataclasses.replace(request, states=states)


def _committed(
    batch: FlatBatch, num_context: int, request: ProposalRequest
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each slot's tokens in the pass, whose last ``num_context`` are of contexts: the slot, the first
    position, its index in the pass, and how many are committed; only of those that have any."""
    segments = Segments.of(batch)
    slots_M = batch.slots_T[segments.starts_S]
    num_accepted = np.full(max(slots_M.max(initial=0), request.slots_R.max(initial=0)) + 1, -1)
    # Of a block whose sequence has ended, or waits, nothing is needed.
    num_accepted[request.slots_R] = request.num_accepted_R
    is_context_M = segments.starts_S >= len(batch) - num_context
    lengths_M = np.where(is_context_M, segments.lengths_S, num_accepted[slots_M] + 1)
    kept = lengths_M > 0
    begins_M = batch.positions_T[segments.starts_S]
    return slots_M[kept], begins_M[kept], segments.starts_S[kept], lengths_M[kept]
