"""Hidden states of the target, on their way to a draft that reads them (EAGLE-3).

With a request travel the states of all tokens that the last pass has run and that are committed: of each
block the next token and the accepted candidates, and all of the contexts. They are sent after the request.

R sequences that decode, M stretches of tokens, T tokens of the last pass, C of them that are committed, S
numbers of a token's states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.engine.interfaces import Proposer
from specdist.engine.packing import not_sent
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.reports import Traffic
from specdist.engine.timeline import Timeline
from specdist.models.flat import FlatBatch, Segments
from specdist.models.states import StatesRunner
from specdist.sampling.uploads import upload
from specdist.utils.ranges import arange_segments, places_from

# By number in a message.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class StatefulRequest(ProposalRequest):
    """A request with states.

    Attributes:
        state_slots_M, state_begins_M, state_lengths_M: stretches of consecutive positions.
        state_width, state_dtype: S, and the index of their type in ``DTYPES``.
        states_CS: sent after the request.
    """

    state_slots_M: np.ndarray
    state_begins_M: np.ndarray
    state_lengths_M: np.ndarray
    state_width: int = 0
    state_dtype: int = 0
    states_CS: Tensor | None = not_sent()

    @property
    def state_places_C(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions."""
        return places_from(self.state_slots_M, self.state_begins_M, self.state_lengths_M)

    def send_states(self, transfer: Callable[[Tensor], object]) -> None:
        if self.states_CS is not None:
            transfer(self.states_CS.contiguous().view(torch.uint8))

    def with_received(self, transfer: Callable[[Tensor], object], device: torch.device) -> StatefulRequest:
        """With the states that were sent after it."""
        num_tokens = int(self.state_lengths_M.sum())
        if not num_tokens:
            return self
        dtype = DTYPES[self.state_dtype]
        states_CS = torch.empty(num_tokens, self.state_width, dtype=dtype, device=device)
        transfer(states_CS.view(torch.uint8))
        return dataclasses.replace(self, states_CS=states_CS)


class StatefulDraft:
    """A proposer that adds the target's states to every request."""

    def __init__(self, draft: Proposer, target: StatesRunner) -> None:
        self._draft = draft
        self._target = target
        self._num_context = 0
        target.last = None  # passes that measured times

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        stateful = self._with_states(request)
        self._num_context = request.num_prefill_tokens
        reply = self._draft.propose(stateful, clock)
        num_bytes = 0 if stateful.states_CS is None else stateful.states_CS.nbytes
        return dataclasses.replace(reply, traffic=reply.traffic + Traffic(num_state_bytes=num_bytes))

    def close(self) -> None:
        self._draft.close()

    def _with_states(self, request: ProposalRequest) -> StatefulRequest:
        found, self._target.last = self._target.last, None
        nothing = np.zeros(0, np.int64)
        if found is None:
            return StatefulRequest(
                **vars(request), state_slots_M=nothing, state_begins_M=nothing, state_lengths_M=nothing
            )
        batch, states_TS = found
        slots_M, begins_M, starts_M, lengths_M = _committed(batch, self._num_context, request)
        index_C = np.repeat(starts_M, lengths_M) + arange_segments(lengths_M)
        return StatefulRequest(
            **vars(request),
            state_slots_M=slots_M,
            state_begins_M=begins_M,
            state_lengths_M=lengths_M,
            state_width=states_TS.shape[1],
            state_dtype=DTYPES.index(states_TS.dtype),
            states_CS=states_TS[upload(states_TS.device, index_C)[0]] if len(index_C) else None,
        )


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
