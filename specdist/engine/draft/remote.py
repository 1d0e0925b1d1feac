"""The draft on a rank of its own: the proposer that sends it requests, and the loop that serves them.

Target → draft: counts, next tokens and context tokens as one message of integers, and one distribution for
each sequence whose next token is to be sampled; for an EAGLE-3 draft hidden states, too. Draft → target:
token ids and the scalar probability of each candidate.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.faults import DraftOutOfMemory, is_out_of_memory
from specdist.engine.messages.links import Wait, wait_of
from specdist.engine.messages.packing import pack, unpack
from specdist.engine.messages.proposals import DRAW, ProposalReply, ProposalRequest
from specdist.engine.messages.wire import Wire, wire_from, wire_to
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import Timeline
from specdist.sampling.distributions import Dense
from specdist.utils.errors import first_line
from specdist.utils.garbage import frozen_garbage

# The first array of a message.
REQUEST, CLOSE, NEWS = np.array([[0], [1], [2]])
CPU = torch.device("cpu")


class RemoteDraft:
    """The proposer on the target's rank 0."""

    def __init__(self, draft_rank: int, *, device: torch.device = CPU, wait: Wait | None = None) -> None:
        """``wait``: for replies; by default as the target's device wants it."""
        self._requests = wire_to(draft_rank)
        self._replies = wire_from(draft_rank, wait or wait_of(device))

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        before = self._traffic()
        # Counted as idle: between machines it returns once the receiver takes it, and a draft may be at work.
        self._requests.send([REQUEST, *pack(request)])
        if request.next_distributions_W is not None:
            assert isinstance(request.next_distributions_W, Dense)
            with clock.phase("transfer"):
                self._requests.transfer(request.next_distributions_W.probabilities_NV.contiguous())
        if request.states is not None:
            with clock.phase("transfer"):
                request.states.send(self._requests.transfer)
        request.meanwhile()
        arrays = self._replies.receive()
        if len(arrays) == 1:
            raise DraftOutOfMemory(arrays[0].astype(np.uint8).tobytes().decode())
        with clock.phase("transfer"):
            return unpack(ProposalReply, arrays, traffic=self._traffic() - before)

    def tell(self, request: ProposalRequest) -> None:
        """A round in which the draft was not asked; there is no reply."""
        self._requests.send([NEWS, *pack(request)])

    def _traffic(self) -> Traffic:
        sent, received = self._requests, self._replies
        return Traffic(sent.num_messages + received.num_messages, sent.num_bytes + received.num_bytes)

    def close(self) -> None:
        self._requests.send([CLOSE])


def serve_draft(
    draft: DraftWorker,
    rank0: int,
    *,
    vocab_size: int,
    clock: Timeline,
    wait: Wait | None = None,
) -> None:
    """Serve requests until the target closes. Contexts are run after the reply is sent, while the target runs
    its pass.

    ``clock`` is the draft's; time outside its phases counts as transfer. News of rounds without the draft get
    no reply. If memory runs out before the reply, the reply is the error; if it runs out after the reply, or
    over news, the reply to the next request is. ``wait``: for requests; by default as the draft's device
    wants it.
    """
    wait = wait or wait_of(draft.device)
    with frozen_garbage():
        _serve_draft(draft, wire_from(rank0, wait), wire_to(rank0), vocab_size=vocab_size, clock=clock)


def _serve_draft(
    draft: DraftWorker, requests: Wire, replies: Wire, *, vocab_size: int, clock: Timeline
) -> None:
    failure: str | None = None
    clock.restart()
    while True:
        with clock.phase("idle"):
            arrays = requests.receive()
        kind = arrays[0].item()
        if kind == CLOSE:
            return
        request = unpack(ProposalRequest, arrays[1:])
        has_replied = kind == NEWS
        num_drawn = int((request.next_token_ids_R == DRAW).sum())
        if num_drawn:
            rows_WV = torch.empty(num_drawn, vocab_size, dtype=torch.float32, device=draft.device)
            requests.transfer(rows_WV)
            request = dataclasses.replace(request, next_distributions_W=Dense(rows_WV))
        if request.states is not None:
            states = request.states.received(requests.transfer, draft.device)
            request = dataclasses.replace(request, states=states)
        try:
            if failure is None and kind == NEWS:
                draft.follow(request)
            elif failure is None:
                replies.send(pack(draft.respond(request)))
                has_replied = True
                draft.prefill_and_draft_ahead(request)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = f"draft: {first_line(error)}"
            draft.recover(has_replied=has_replied)
        if failure is not None and not has_replied:
            replies.send([np.frombuffer(failure.encode(), np.uint8)])
            failure = None
