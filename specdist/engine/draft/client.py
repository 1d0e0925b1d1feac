"""The draft as the target's rank 0 sees it, wherever it runs: asked in a round, or skipped.

While plain decoding is faster the target goes on alone; the draft's reply says for how many rounds. It can
say so only when nothing is drafted that the target has still to verify, so each next token is a bonus token,
sampled on the target's side with the random number that the draft would use. Nothing of such a round waits
for the draft: it is told of prompts, which it runs too, when they come, and of the tokens that it has missed
with the next message. Without a draft every round is such a round.

There are two ways to a draft: in the process of the target, or of its rank 0, and on a rank of its own. Then
counts, next tokens and context tokens go to it as one message of integers, and one distribution for each
sequence whose next token is to be sampled; to a drafter of states hidden states, too. Back come token ids and
the scalar probability of each candidate.

R sequences that decode, W of them whose next token is sampled, T missed tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch

from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages import codec
from specdist.engine.messages.link import CPU, Wait, link_from, link_to, wait_of
from specdist.engine.messages.proposals import DRAW, NO_TOKENS, ProposalReply, ProposalRequest
from specdist.engine.messages.target_states import LastStates
from specdist.engine.times.reports import AheadReport, RoleTimes
from specdist.engine.times.timeline import Timeline
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import NOT_FINITE, Dense, sample_next_tokens
from specdist.sampling.random import RandomKeys
from specdist.sampling.uploads import upload
from specdist.utils.garbage import frozen_garbage

# The placeholder of a rejected candidate's id: none was rejected, and the token is drawn from P.
NONE_REJECTED = -1


class Channel(Protocol):
    """The way to a draft: :class:`InProcess` or :class:`ToRank`."""

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        """The draft's reply; ``clock`` as of :meth:`Proposer.propose`."""
        ...

    def tell(self, request: ProposalRequest | None) -> None:
        """Send what happened in rounds that skipped the draft; None: no round will follow."""
        ...


class Draft:
    """The proposer of candidates that a draft draws."""

    def __init__(
        self,
        channel: Channel | None = None,
        *,
        max_missed_tokens: int = 0,
        least_share: float = 0.0,
        states: LastStates | None = None,
    ) -> None:
        """
        Args:
            channel: None for target-only generation.
            max_missed_tokens: most that the draft may have to run in one forward later.
            least_share: of the sequences that the draft chose for; it is asked again as soon as fewer decode.
            states: the target's, for a draft that reads them.
        """
        self._channel = channel
        self._max_missed_tokens = max_missed_tokens
        self._least_share, self._least_rows = least_share, 0.0
        self._states = states
        self._num_rounds_alone = 0
        self._missed: list[FlatBatch] = []
        self._updates: list[PageUpdates] = []

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        if self._channel is None:
            return _reply_alone(request)
        if self._states is not None:
            states = self._states.taken(request.slots_R, request.num_accepted_R, request.num_prefill_tokens)
            request = dataclasses.replace(request, states=states)
        num_rows = len(request.slots_R)
        # A resumed sequence's candidates are drafted again, whatever pays today. Prompts alone ask nothing.
        is_valid = (num_rows >= self._least_rows or not num_rows) and not request.num_redraft_R.any()
        if self._num_rounds_alone and is_valid:
            return self._skip(request, self._channel)
        if self._missed:
            # Nothing was drafted, so there is nothing for the draft to decide, and no distribution to send.
            request = _with_next_tokens(request, sample_alone(request))
        reply = self._channel.ask(self._with_missed(request), clock)
        self._num_rounds_alone, self._least_rows = reply.num_rounds_alone, self._least_share * num_rows
        return reply

    def close(self) -> None:
        if self._channel is not None:
            self._channel.tell(None)

    def _skip(self, request: ProposalRequest, channel: Channel) -> ProposalReply:
        self._num_rounds_alone -= 1
        reply = _reply_alone(request)
        finite = np.flatnonzero(reply.next_token_ids_R != NOT_FINITE)
        positions_R = np.array([len(sequence.token_ids) for sequence in request.sequences], np.int64)
        self._missed.append(
            FlatBatch(reply.next_token_ids_R[finite], request.slots_R[finite], positions_R[finite])
        )
        has_news = len(request.opened.slots) or len(request.context) or len(request.suspended_slots)
        if has_news or sum(map(len, self._missed)) >= self._max_missed_tokens:
            channel.tell(self._with_missed(_with_next_tokens(request, reply.next_token_ids_R)))
        else:
            self._updates.append(request.page_updates)
        return reply

    def _with_missed(self, request: ProposalRequest) -> ProposalRequest:
        """The request, and what the draft was not told of before; now it is."""
        if not (self._updates or self._missed):
            return request
        page_updates = PageUpdates.joined([*self._updates, request.page_updates])
        missed = FlatBatch.joined(self._missed) if self._missed else NO_TOKENS
        self._updates, self._missed = [], []
        return dataclasses.replace(request, page_updates=page_updates, missed=missed)


def sample_alone(request: ProposalRequest, rejected_ids_R: np.ndarray | None = None) -> np.ndarray:
    """[R]: next tokens in whose places no draft model drew anything.

    ``rejected_ids_R``: candidates of a draft that was certain of them and that were rejected there, or
    ``NONE_REJECTED``.
    """
    request.meanwhile()
    next_token_ids_R = request.next_token_ids_R.copy()
    drawn = np.flatnonzero(next_token_ids_R == DRAW)
    if len(drawn):
        target_W = request.next_distributions_W
        assert target_W is not None
        sequences = [request.sequences[index] for index in drawn]
        numbers = [(each.stream_key, len(each.token_ids), each.counters.num_misses) for each in sequences]
        keys_3W = np.array(numbers, np.int64).T.copy()
        sampled_W = sample_next_tokens(target_W, RandomKeys(*keys_3W))
        if rejected_ids_R is not None and (rejected_ids_R[drawn] != NONE_REJECTED).any():
            # Q has all mass on the candidate.
            rows = np.flatnonzero(rejected_ids_R[drawn] != NONE_REJECTED)
            rows_M, ids_M = upload(target_W.device, rows, rejected_ids_R[drawn][rows])
            target_M = target_W.select(rows)
            draft_MV = torch.zeros_like(target_M.probabilities_NV).scatter_(1, ids_M[:, None], 1.0)
            sampled_W[rows_M] = sample_next_tokens(target_M, RandomKeys(*keys_3W[:, rows]), Dense(draft_MV))
        next_token_ids_R[drawn] = sampled_W.cpu().numpy()
    return next_token_ids_R


def _reply_alone(request: ProposalRequest) -> ProposalReply:
    """Every next token is sampled from the target's distribution, and nothing is drafted after it."""
    num_rows, nothing = len(request.slots_R), np.zeros(0, np.int64)
    return ProposalReply(
        next_token_ids_R=sample_alone(request),
        num_drafted_R=np.zeros(num_rows, np.int64),
        candidate_ids_C=nothing,
        draft_probabilities_C=nothing.astype(np.float64),
        ahead=AheadReport.nothing(num_rows),
        draft_pass_sizes_P=nothing,
        times=RoleTimes(),
    )


def _with_next_tokens(request: ProposalRequest, next_token_ids_R: np.ndarray) -> ProposalRequest:
    return dataclasses.replace(request, next_token_ids_R=next_token_ids_R, next_distributions_W=None)


# The first array of a message.
ASKED, TOLD = np.array([[0], [1]])


class InProcess:
    """A draft that takes turns with the target on one device. Other ranks of the target have no part in it:
    they wait for the next pass to be announced."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        del clock  # the target is idle all the while
        reply = self._draft.respond(request)
        self._draft.prefill_and_draft_ahead(request)
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
        # Counted as idle: between machines it returns once the receiver takes it, and a draft may be at work.
        self._requests.send([ASKED, *codec.packed_request(request)])
        if following := codec.tensors(request):
            with clock.phase("transfer"):
                for tensor in following:
                    self._requests.transfer(tensor)
        request.meanwhile()
        arrays = self._replies.receive()
        with clock.phase("transfer"):
            return codec.unpacked_reply(arrays)

    def tell(self, request: ProposalRequest | None) -> None:
        self._requests.send([] if request is None else [TOLD, *codec.packed_request(request)])


def serve_draft(draft: DraftWorker, rank0: int, *, clock: Timeline, wait: Wait | None = None) -> None:
    """Serve requests until the target closes. Contexts are run after the reply is sent, while the target runs
    its pass. News of rounds without the draft get no reply.

    ``clock`` is the draft's; time outside its phases counts as transfer. ``wait``: for requests; by default
    as the draft's device wants it.
    """
    requests, replies = link_from(rank0, wait or wait_of(draft.device)), link_to(rank0)
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
            if arrays[0] == TOLD:
                draft.follow(request)
                continue
            replies.send(codec.packed_reply(draft.respond(request)))
            draft.prefill_and_draft_ahead(request)
