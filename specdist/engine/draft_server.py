"""One draft for several target groups: requests that wait are answered by one burst of passes.

A target group that sends a request while the draft is at work waits until that burst is over, and is then
served together with all others that wait. A draft that has worked ahead replies at once, and then does the
next work ahead for several groups together. Where that makes all rounds shorter, it waits for a group that is
expected (:mod:`specdist.engine.meetings`): no group waits for another for longer than one burst.

Slots and pages of the groups stand side by side (:mod:`specdist.engine.grouping`).

A group that disappears leaves its slots empty; the others notice nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specdist.engine.draft_worker import DraftWorker
from specdist.engine.faults import is_out_of_memory
from specdist.engine.grouping import GroupSizes, merged, split
from specdist.engine.meetings import Meetings
from specdist.engine.packing import pack, unpack
from specdist.engine.proposals import ProposalReply, ProposalRequest
from specdist.engine.sockets import CHUNK_BYTES, Inbox, Kind, LinkError, Message
from specdist.engine.timeline import Timeline
from specdist.sampling.distributions import Dense
from specdist.utils.errors import first_line
from specdist.utils.garbage import frozen_garbage

NS_PER_S = 1e9

logger = logging.getLogger(__name__)


class Peer:
    """A connection of a target group. ``worker``: None until its greeting was accepted."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.group = -1
        self.worker: DraftWorker | None = None
        self.requests: deque[Message] = deque()
        self.error: str | None = None
        self._inbox = Inbox()
        self._outgoing = bytearray()

    @property
    def is_asking(self) -> bool:
        """Its next message is a request."""
        return bool(self.requests) and self.requests[0].kind is Kind.REQUEST

    @property
    def replies_first(self) -> bool:
        """What its next reply says is drafted already."""
        return self.worker is not None and self.worker.replies_first

    @property
    def has_outgoing(self) -> bool:
        """Bytes that the socket has not taken yet."""
        return bool(self._outgoing)

    def read(self) -> None:
        """Take what has arrived. Raises LinkError or OSError if the connection has ended."""
        while True:
            try:
                content = self.socket.recv(CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not content:
                raise LinkError("it has closed the connection")
            self._inbox.add(content)
            while (message := self._inbox.take()) is not None:
                self.requests.append(message)

    def send(self, message: Message) -> None:
        """At once what the socket takes, the rest by :meth:`flush`. Raises OSError."""
        for part in message.encoded():
            self._outgoing += part
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            try:
                num_sent = self.socket.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            del self._outgoing[:num_sent]


class DraftServer:
    """Serves target groups until it is asked to end.

    A greeting is JSON: ``group``, the number of the target group, and whatever ``worker_for`` needs.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        sizes: GroupSizes,
        worker_for: Callable[[Mapping[str, Any]], tuple[DraftWorker, dict[str, Any]]],
        *,
        clock: Timeline,
        is_allowed: Callable[[socket.socket], bool] = lambda connection: True,
        poll_s: float = 0.5,
    ) -> None:
        """
        Args:
            listeners: accept connections.
            worker_for: the draft that serves the group that greets so, and the values of its welcome; raises
                ValueError with the reason of a refusal.
            is_allowed: whether to talk to the other end of a new connection.
            clock: of all workers; time outside its phases counts as transfer.
        """
        self._sizes = sizes
        self._worker_for = worker_for
        self._clock = clock
        self._is_allowed = is_allowed
        self._poll_s = poll_s
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._peers: list[Peer] = []
        # Those that have their replies, and for which the work ahead is still to do.
        self._owed: list[tuple[Peer, ProposalRequest]] = []
        self._num_bursts = 0
        self._meetings = Meetings()

    def run(self, should_end: Callable[[], bool]) -> None:
        """Serve until ``should_end()``, which is asked between bursts and every ``poll_s`` seconds."""
        self._clock.restart()
        with frozen_garbage():
            while not should_end():
                self.step()
        for peer in list(self._peers):
            self._drop(peer, None)

    def step(self) -> None:
        """Wait for messages, then serve all that wait; unless it pays to wait for one more group, also do the
        work ahead."""
        with self._clock.phase("idle"):
            events = self._selector.select(self._timeout_s())
        for key, mask in events:
            if isinstance(key.data, socket.socket):
                self._accept(key.data)
            else:
                self._exchange(key.data, mask)
        is_held = self._hold_s() > 0
        owed = [peer for peer, _ in self._owed]
        waiting = [peer for peer in self._peers if peer.requests and peer not in owed]
        self._serve([peer for peer in waiting if not (is_held and peer.is_asking and not peer.replies_first)])
        # A group that asks again gets what it is owed first.
        if self._owed and (any(peer.requests for peer, _ in self._owed) or not self._hold_s()):
            self._work_ahead(time.monotonic())

    def _timeout_s(self) -> float:
        waiting = [peer for peer in self._peers if peer.requests]
        if not waiting and not self._owed:
            return self._poll_s
        if any(peer.replies_first or not peer.is_asking for peer in waiting):
            return 0.0
        return self._hold_s()

    def _hold_s(self) -> float:
        """For how long it pays to wait for one more group."""
        now = time.monotonic()
        return max(0.0, self._meetings.hold_until(now) - now)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if not self._is_allowed(connection):
            logger.warning("a connection of another user is refused")
            connection.close()
            return
        peer = Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _exchange(self, peer: Peer, mask: int) -> None:
        """Read, and send what is left."""
        try:
            if mask & selectors.EVENT_WRITE:
                peer.flush()
            if mask & selectors.EVENT_READ:
                was_asking = peer.is_asking
                peer.read()
                if peer.is_asking and not was_asking:
                    self._meetings.asked(peer.group, time.monotonic())
            self._select(peer)
        except (OSError, LinkError) as error:
            self._drop(peer, error)

    def _select(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_outgoing else 0)
        self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: Peer, error: Exception | None) -> None:
        """Its group's slots are empty from now on."""
        if peer not in self._peers:
            return
        if error is not None and peer.worker is not None:
            logger.info("target group %d has left: %s", peer.group, error)
        self._peers.remove(peer)
        self._owed = [owed for owed in self._owed if owed[0] is not peer]
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._meetings.left(peer.group)
        if peer.worker is not None:
            peer.worker.begin_group(peer.group)

    def _say(self, peer: Peer, message: Message) -> None:
        try:
            peer.send(message)
            self._select(peer)
        except OSError as error:
            self._drop(peer, error)

    def _serve(self, peers: list[Peer]) -> None:
        """One message of each peer: greetings and news one after the other, requests together."""
        asking: list[tuple[Peer, ProposalRequest]] = []
        for peer in peers:
            message = peer.requests.popleft()
            try:
                if message.kind is Kind.GREETING and peer.worker is None:
                    self._greet(peer, message)
                elif peer.worker is None or message.kind not in (Kind.REQUEST, Kind.NEWS):
                    raise LinkError(f"{message.kind.name} is out of place")
                elif peer.error is not None:
                    # News of the same failure need no answer.
                    if message.kind is Kind.REQUEST:
                        self._say_error(peer)
                else:
                    request = self._request(peer, message)
                    if message.kind is Kind.NEWS:
                        self._follow(peer, request)
                    else:
                        asking.append((peer, request))
            except (LinkError, ValueError, StopIteration) as error:
                logger.warning("a connection to the draft is closed: %s", error)
                self._drop(peer, error)
        # Meanwhile a group may have connected again; a failure over news concerns those that have asked, too.
        asking = [(peer, request) for peer, request in asking if peer in self._peers]
        ready = [(peer, request) for peer, request in asking if peer.error is None]
        for peer, _ in asking:
            if peer.error is not None:
                self._say_error(peer)
        for worker in {id(peer.worker): peer.worker for peer, _ in ready}.values():
            assert worker is not None
            self._answer(worker, [(peer, request) for peer, request in ready if peer.worker is worker])

    def _greet(self, peer: Peer, message: Message) -> None:
        values = message.values
        group = values.get("group")
        try:
            if not isinstance(group, int) or not 0 <= group < self._sizes.num_groups:
                raise ValueError(f"target group {group!r} of {self._sizes.num_groups}")
            worker, welcome = self._worker_for(values)
        except ValueError as error:
            self._say(peer, Message.of_text(Kind.REFUSAL, str(error)))
            return
        for other in list(self._peers):
            if other.group == group:
                self._drop(other, LinkError("it has connected again"))
        peer.group, peer.worker = group, worker
        worker.begin_group(group)
        self._say(peer, Message.of_values(Kind.WELCOME, welcome))

    def _request(self, peer: Peer, message: Message) -> ProposalRequest:
        assert peer.worker is not None
        request = unpack(ProposalRequest, list(message.arrays))
        if message.matrix is not None:
            rows_WV = torch.from_numpy(message.matrix).to(peer.worker.device)
            request = dataclasses.replace(request, next_distributions_W=Dense(rows_WV))
        if request.away_ns:
            self._meetings.was_away(peer.group, request.away_ns / NS_PER_S)
        return self._sizes.shifted(request, peer.group)

    def _follow(self, peer: Peer, request: ProposalRequest) -> None:
        assert peer.worker is not None
        try:
            peer.worker.follow(request)
        except (RuntimeError, MemoryError) as error:
            self._fail(peer.worker, error, has_replied=True)

    def _answer(self, worker: DraftWorker, asking: list[tuple[Peer, ProposalRequest]]) -> None:
        """Answer these requests together. The work ahead for them follows now, or with that for others."""
        # The first gets the passes' statistics: another one in the next burst.
        self._num_bursts += 1
        turn = self._num_bursts % len(asking)
        asking = asking[turn:] + asking[:turn]
        replies_first, begin = worker.replies_first, time.monotonic()
        try:
            reply = worker.respond(merged([request for _, request in asking]))
        except (RuntimeError, MemoryError) as error:
            self._fail(worker, error, has_replied=False)
            for peer, _ in asking:
                self._say_error(peer)
            return
        self._owed += asking
        replies = split(reply, [len(request.slots_R) for _, request in asking])
        for (peer, _), own in zip(asking, replies, strict=True):
            self._say(peer, _packed(own))
            self._meetings.replied(peer.group, time.monotonic())
        if not replies_first:
            self._work_ahead(begin)

    def _work_ahead(self, begin: float) -> None:
        """Of all groups that it is owed to, as the rest of a burst that has begun at this moment."""
        owed, self._owed = self._owed, []
        replied = time.monotonic()
        for worker in {id(peer.worker): peer.worker for peer, _ in owed}.values():
            assert worker is not None
            own = [(peer, request) for peer, request in owed if peer.worker is worker]
            try:
                worker.prefill_and_draft_ahead(merged([request for _, request in own]))
            except (RuntimeError, MemoryError) as error:
                self._fail(worker, error, has_replied=True)
        self._meetings.served([peer.group for peer, _ in owed], begin, replied, time.monotonic())

    def _fail(self, worker: DraftWorker, error: Exception, *, has_replied: bool) -> None:
        """Memory has run out: what was drafted for any group is lost. Raises other errors."""
        if not is_out_of_memory(error):
            raise error
        worker.recover(has_replied=has_replied)
        self._owed = [owed for owed in self._owed if owed[0].worker is not worker]
        for peer in self._peers:
            if peer.worker is worker:
                peer.error = f"draft: {first_line(error)}"

    def _say_error(self, peer: Peer) -> None:
        assert peer.error is not None
        message, peer.error = Message.of_text(Kind.OUT_OF_MEMORY, peer.error), None
        self._say(peer, message)


def _packed(reply: ProposalReply) -> Message:
    return Message(Kind.REPLY, pack(reply))
