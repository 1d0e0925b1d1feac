"""A draft that is not asked in every round: while plain decoding is faster, the target goes on alone.

The draft's reply says for how many rounds. It can say so only when nothing is drafted that the target has
still to verify, so each next token is a bonus token, sampled on the target's side with the random number that
the draft would use. Nothing of such a round waits for the draft: it is told of prompts, which it runs too,
when they come, and of the tokens that it has missed with the next message.

R sequences that decode, T missed tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from specdist.engine.draft.no_draft import NoDraft, sample_alone
from specdist.engine.interfaces import Proposer
from specdist.engine.messages.proposals import NOTHING_MISSED, ProposalReply, ProposalRequest
from specdist.engine.times.timeline import Timeline
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.flat import FlatBatch
from specdist.sampling.distributions import NOT_FINITE


class InformedDraft(Proposer, Protocol):
    """A proposer that can be told of a round without being asked."""

    def tell(self, request: ProposalRequest) -> None: ...


class DraftOnDemand:
    """The proposer on the target's rank 0 where the draft chooses each round's work."""

    def __init__(self, draft: InformedDraft, *, max_missed_tokens: int, least_share: float = 0.0) -> None:
        """``max_missed_tokens``: most that the draft may have to run in one pass later. ``least_share``: of
        the sequences that the draft chose for; it is asked again as soon as fewer decode."""
        self._draft = draft
        self._max_missed_tokens = max_missed_tokens
        self._least_share, self._least_rows = least_share, 0.0
        self._num_rounds_alone = 0
        self._missed: list[FlatBatch] = []
        self._updates: list[PageUpdates] = []

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        num_rows = len(request.slots_R)
        # A resumed sequence's candidates are drafted again, whatever pays today. Prompts alone ask nothing.
        is_valid = (num_rows >= self._least_rows or not num_rows) and not request.num_redraft_R.any()
        if self._num_rounds_alone and is_valid:
            return self._go_on_alone(request, clock)
        if self._missed:
            # Nothing was drafted, so there is nothing for the draft to decide, and no distribution to send.
            request = _with_next_tokens(request, sample_alone(request))
        self._num_rounds_alone = 0
        reply = self._draft.propose(self._with_missed(request), clock)
        self._num_rounds_alone, self._least_rows = reply.num_rounds_alone, self._least_share * num_rows
        return reply

    def _go_on_alone(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        self._num_rounds_alone -= 1
        reply = NoDraft().propose(request, clock)
        finite = np.flatnonzero(reply.next_token_ids_R != NOT_FINITE)
        positions_R = np.array([len(sequence.token_ids) for sequence in request.sequences], np.int64)
        self._missed.append(
            FlatBatch(reply.next_token_ids_R[finite], request.slots_R[finite], positions_R[finite])
        )
        has_news = len(request.opened.slots) or len(request.context) or len(request.suspended_slots)
        if has_news or sum(map(len, self._missed)) >= self._max_missed_tokens:
            self._draft.tell(self._with_missed(_with_next_tokens(request, reply.next_token_ids_R)))
        else:
            self._updates.append(request.page_updates)
        return reply

    def _with_missed(self, request: ProposalRequest) -> ProposalRequest:
        """The request, and what the draft was not told of before; now it is."""
        if not (self._updates or self._missed):
            return request
        updates, missed = [*self._updates, request.page_updates], self._missed or [NOTHING_MISSED]
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

    def close(self) -> None:
        self._draft.close()


def _with_next_tokens(request: ProposalRequest, next_token_ids_R: np.ndarray) -> ProposalRequest:
    return dataclasses.replace(request, next_token_ids_R=next_token_ids_R, next_distributions_W=None)
