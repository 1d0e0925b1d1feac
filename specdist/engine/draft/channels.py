"""The two ways to a draft: in the process of the target, or of its rank 0, and on a rank of its own.

Target → draft: counts, next tokens and context tokens as one message of integers, and one distribution for
each sequence whose next token is to be sampled; for a drafter of states hidden states, too. Draft → target:
token ids and the scalar probability of each candidate.
"""

from __future__ import annotations

import numpy as np
import torch

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages import codec
from specdist.engine.messages.failures import DraftOutOfMemory, is_out_of_memory
from specdist.engine.messages.link import CPU, Wait, link_from, link_to, wait_of
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import Timeline
from specdist.utils.errors import first_line
from specdist.utils.garbage import frozen_garbage

# The first array of a message. An error of the draft is the only one of a reply.
ASKED, TOLD = np.array([[0], [1]])


class InProcess:
    """A draft that takes turns with the target on one device. Other ranks of the target have no part in it:
    they wait for the next pass to be announced."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        try:
            reply = self._draft.respond(request)
            self._draft.prefill_and_draft_ahead(request)
        except (RuntimeError, MemoryError) as error:
            self._draft.recover(has_replied=False)
            if is_out_of_memory(error):
                raise DraftOutOfMemory(_out_of_memory(error)) from error
            raise
        return reply

    def tell(self, request: ProposalRequest | None) -> None:
        if request is not None:
            self._draft.follow(request)


class ToRank:
    """A draft on this rank of the world, where :func:`serve_draft` runs."""

    def __init__(self, rank: int, device: torch.device = CPU, wait: Wait | None = None) -> None:
        """``device``: the target's. ``wait``: for replies; by default as that device wants it."""
        self._requests = link_to(rank)
        self._replies = link_from(rank, wait or wait_of(device))

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        before = self._traffic()
        # Counted as idle: between machines it returns once the receiver takes it, and a draft may be at work.
        self._requests.send([ASKED, *codec.packed_request(request)])
        if following := codec.tensors(request):
            with clock.phase("transfer"):
                for tensor in following:
                    self._requests.transfer(tensor)
        request.meanwhile()
        arrays = self._replies.receive()
        if len(arrays) == 1:
            raise DraftOutOfMemory(codec.unpickled(arrays[0]))
        with clock.phase("transfer"):
            return codec.unpacked_reply(arrays, self._traffic() - before)

    def tell(self, request: ProposalRequest | None) -> None:
        self._requests.send([] if request is None else [TOLD, *codec.packed_request(request)])

    def _traffic(self) -> Traffic:
        sent, received = self._requests, self._replies
        return Traffic(sent.num_messages + received.num_messages, sent.num_bytes + received.num_bytes)


def serve_draft(draft: DraftWorker, rank0: int, *, clock: Timeline, wait: Wait | None = None) -> None:
    """Serve requests until the target closes. Contexts are run after the reply is sent, while the target runs
    its pass.

    ``clock`` is the draft's; time outside its phases counts as transfer. News of rounds without the draft get
    no reply. If memory runs out before the reply, the reply is the error; if it runs out after the reply, or
    over news, the reply to the next request is. ``wait``: for requests; by default as the draft's device
    wants it.
    """
    requests, replies = link_from(rank0, wait or wait_of(draft.device)), link_to(rank0)
    failure: str | None = None
    with frozen_garbage():
        clock.restart()
        while True:
            with clock.phase("idle"):
                arrays = requests.receive()
            if not arrays:
                return
            request = codec.unpacked_request(arrays[1:], draft.device)
            for tensor in codec.tensors(request):
                requests.transfer(tensor)
            is_told = has_replied = bool(arrays[0] == TOLD)
            try:
                if failure is None and is_told:
                    draft.follow(request)
                elif failure is None:
                    replies.send(codec.packed_reply(draft.respond(request)))
                    has_replied = True
                    draft.prefill_and_draft_ahead(request)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = _out_of_memory(error)
                draft.recover(has_replied=has_replied)
            if failure is not None and not has_replied:
                replies.send([codec.pickled(failure)])
                failure = None


def _out_of_memory(error: BaseException) -> str:
    return f"draft: {first_line(error)}"
