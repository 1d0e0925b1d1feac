"""The draft as the target's rank 0 sees it, wherever it runs: asked in a round, or skipped.

While plain decoding is faster the target goes on alone; the draft's reply says for how many rounds. It can
say so only when nothing is drafted that the target has still to verify, so each next token is a bonus token,
sampled on the target's side with the random number that the draft would use. Nothing of such a round waits
for the draft: it is told of prompts, which it runs too, when they come, and of the tokens that it has missed
with the next message. Without a draft every round is such a round.

R sequences that decode, W of them whose next token is sampled, T missed tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from specdist.engine.messages.proposals import DRAW, NO_TOKENS, ProposalReply, ProposalRequest
from specdist.engine.messages.target_states import LastStates
from specdist.engine.times.reports import AheadReport, RoleTimes, Traffic
from specdist.engine.times.timeline import Timeline
from specdist.models.batch.flat import FlatBatch
from specdist.models.cache.pages import PageUpdates
from specdist.sampling.distributions import NOT_FINITE
from specdist.sampling.one_hot_drafts import without_rejected
from specdist.sampling.random import RandomKeys
from specdist.sampling.rejection_sampler import sample_next_tokens


class Channel(Protocol):
    """The way to a draft: see :mod:`specdist.engine.draft.channels`."""

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
        if request.states is not None:
            read = Traffic(num_state_bytes=request.states.states_CS.nbytes)
            reply = dataclasses.replace(reply, traffic=reply.traffic + read)
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
        updates, missed = [*self._updates, request.page_updates], self._missed or [NO_TOKENS]
        self._updates, self._missed = [], []
        return dataclasses.replace(
            request,
            page_updates=PageUpdates(
                *(np.concatenate([getattr(update, name) for update in updates])
                  for name in ("slots", "indices", "pages"))
            ),
            missed=FlatBatch(
                *(np.concatenate([getattr(tokens, name) for tokens in missed])
                  for name in ("token_ids_T", "slots_T", "positions_T"))
            ),
        )  # fmt: skip


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
        keys_W = RandomKeys(
            np.array([sequence.stream_key for sequence in sequences], np.int64),
            np.array([len(sequence.token_ids) for sequence in sequences], np.int64),
            np.array([sequence.counters.num_misses for sequence in sequences], np.int64),
        )
        if rejected_ids_R is not None:
            target_W = without_rejected(target_W, rejected_ids_R[drawn])
        next_token_ids_R[drawn] = sample_next_tokens(target_W, keys_W).cpu().numpy()
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
