"""A draft that learns while it waits for the target.

The rows that it learns from are those whose slots others take: it knows their tokens but for the last few.
It learns, and is replaced, after a round's work is done and before the next message is read, so that no block
has tokens of two drafts. What it has drafted keeps the distributions that it was drawn from, and what its
cache has of running sequences stays: keys and values of the former draft.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from specdist.engine.draft_worker import DraftWorker
from specdist.engine.links import ASKING_S, busy_wait
from specdist.engine.opened import OpenedSequences
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.spare_time import SpareTime
from specdist.learning.adaptation import GOING_BACK, NOTHING_TO_DO, REPLACING
from specdist.learning.rows import RowBuffer
from specdist.stats.learning import Learned
from specdist.utils.polling import is_readable
from specdist.utils.ranges import places_from

# The longest piece, as a part of the time until a message is due: longer ones leave gaps, shorter ones take
# more time for the same work.
LONGEST_PIECE, SHORTEST_PIECE = 0.4, 0.1
# Of the time that a kind of piece has taken, what remains of it in the estimate with every later one, and
# with every wait for which it was too long.
FADING = 0.9
NS_PER_S = 1e9


class Learner(Protocol):
    """What learns in pieces: :class:`specdist.learning.adaptation.Adaptation`."""

    rows: RowBuffer
    learned: Learned

    def pieces(self) -> Iterator[str]: ...

    def resize(self, factor: float) -> bool: ...


class AdaptingDraftWorker(DraftWorker):
    """On a rank of its own, whose waits for requests are :meth:`wait`."""

    def __init__(self, *args: Any, learner: Learner, spare: SpareTime | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._learner, self._spare = learner, spare or SpareTime()
        self._num_prompt_tokens = np.zeros(len(self._draft_state.num_committed), np.int64)
        self._pieces = learner.pieces()
        self._next = next(self._pieces)
        self._seconds: dict[str, float] = {}
        self._may_learn = True
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def respond(self, request: ProposalRequest) -> ProposalReply:
        self._may_learn = False
        reply = super().respond(request)
        reply.times.add_learned(self._learner.learned)
        self._learner.learned.forget_learned()
        return reply

    def prefill_and_draft_ahead(self, request: ProposalRequest) -> None:
        super().prefill_and_draft_ahead(request)
        self._may_learn = True

    def follow(self, request: ProposalRequest) -> None:
        self._may_learn = False
        super().follow(request)
        self._may_learn = True

    def recover(self, *, has_replied: bool) -> None:
        super().recover(has_replied=has_replied)
        self._may_learn = True

    def _open_and_prefill(self, request: ProposalRequest) -> None:
        self._take_finished(request.opened, request.suspended_slots)
        super()._open_and_prefill(request)
        opened = request.opened
        # Tokens of pages that they share are run by nobody.
        shared = places_from(opened.slots, np.zeros_like(opened.slots), opened.prefix_lengths)
        self._draft_state.put_undrafted(shared, opened.prefix_ids)

    def _take_finished(self, opened: OpenedSequences, suspended_slots: np.ndarray) -> None:
        """The rows whose slots are taken by others, but for those that will go on."""
        state = self._draft_state
        for slot in opened.slots[~np.isin(opened.slots, suspended_slots)].tolist():
            num_prompt_tokens, end = int(self._num_prompt_tokens[slot]), int(state.num_committed[slot])
            if num_prompt_tokens and end > num_prompt_tokens:
                key = int(state.stream_keys[slot])
                self._learner.rows.add(state.token_ids[slot, :end], num_prompt_tokens, key)
        self._num_prompt_tokens[suspended_slots] = 0
        self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens

    def begin_group(self, group: int) -> None:
        super().begin_group(group)
        self._num_prompt_tokens[self._draft_state.slots_of(group)] = 0

    def wait(self, connection: socket.socket) -> None:
        """A :data:`specdist.engine.links.Wait`: learn while there is time for it. What belongs to a message
        that has begun to arrive is not waited for like this: the round has begun."""
        if not self._may_learn:
            if self._stream is not None:
                busy_wait(connection)
            return
        self._may_learn = False
        self._spare.begin()
        came, is_late, has_learned = time.monotonic(), False, False
        while not is_readable(connection):
            came, is_late = time.monotonic(), False
            seconds = self._seconds.get(self._next, 0.0)
            if self._next == NOTHING_TO_DO:
                self.learn_piece()
            if self._next != NOTHING_TO_DO and self._spare.may_take(seconds):
                self.learn_piece()
                is_late = has_learned = True
            else:
                self._rest(connection, seconds)
                came = time.monotonic()
        self._spare.end(came, is_late=is_late)
        if not has_learned and self._next in self._seconds:
            # What has taken long once, as the first piece of a kind does, must be tried again.
            self._seconds[self._next] *= FADING
        self._fit_pieces()

    def learn_piece(self) -> None:
        """The next piece of work; on a device, queued and done."""
        begin, kind = time.monotonic(), self._next
        if self._stream is None:
            self._next = next(self._pieces)
        else:
            with torch.cuda.stream(self._stream):
                self._next = next(self._pieces)
                done = torch.cuda.Event()
                done.record()
            done.synchronize()
        seconds = time.monotonic() - begin
        self._seconds[kind] = max(seconds, FADING * self._seconds.get(kind, 0.0) + (1 - FADING) * seconds)
        if kind != NOTHING_TO_DO:
            self._learner.learned.adapt_ns += round(seconds * NS_PER_S)

    def _rest(self, connection: socket.socket, seconds: float) -> None:
        """Until something arrives, or there may be time again; a rank with a device stays awake."""
        is_idle = self._next == NOTHING_TO_DO
        timeout = ASKING_S if is_idle else min(ASKING_S, self._spare.next_chance_s(seconds))
        if self._stream is None:
            is_readable(connection, timeout)
            return
        end = time.monotonic() + timeout
        while not is_readable(connection) and time.monotonic() < end:
            pass

    def _fit_pieces(self) -> None:
        """Pieces that fit into the waits."""
        sizes = [seconds for kind, seconds in self._seconds.items() if kind not in (REPLACING, GOING_BACK)]
        due_s, longest_s = self._spare.due_s, max(sizes, default=0.0)
        if not due_s or not longest_s:
            return
        if longest_s > LONGEST_PIECE * due_s:
            self._change_size(0.5)
        elif longest_s < SHORTEST_PIECE * due_s:
            self._change_size(2.0)

    def _change_size(self, factor: float) -> None:
        if self._learner.resize(factor):
            self._seconds = {kind: factor * seconds for kind, seconds in self._seconds.items()}
