"""Several target groups and the draft that they share, in one process: an engine each in a thread of its own.

The draft waits until every group that has connected has asked, so that their requests meet in every burst.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from specdist.engine.draft_server import DraftServer, Peer
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.grouping import GroupSizes
from specdist.engine.interfaces import Proposer
from specdist.engine.on_demand import DraftOnDemand
from specdist.engine.proposals import ProposalRequest
from specdist.engine.request import Completion, Request
from specdist.engine.shared_draft import Dialer, LinkedDraft, SharedDraft
from specdist.engine.sockets import Kind, Link, LinkError, Message
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.timeline import Timeline
from specdist.models.runner import ModelRunner
from specdist.stats.shard import Stats
from tests.engine.harness import Harness
from tests.engine.markov import MarkovRunner

TIMEOUT_S = 20.0


class MeetingServer(DraftServer):
    """Serves requests when all groups have asked. Or, where it works ahead and ``replies_apart``, each by
    itself, and works ahead when all have their replies or one of them asks again. ``bursts`` and ``replies``
    count how many groups were served together."""

    def __init__(self, *arguments: Any, replies_apart: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options, poll_s=0.01)
        self.bursts: Counter[int] = Counter()
        self.replies: Counter[int] = Counter()
        self._replies_apart = replies_apart

    def _serve(self, peers: list[Peer]) -> None:
        asking = [peer for peer in peers if peer.requests[0].kind is Kind.REQUEST]
        others = [peer for peer in peers if peer not in asking]
        if self._replies_apart:
            others += asking[:1]
        elif len(asking) == self._num_connected:
            others += asking
        super()._serve(others)

    def _hold_s(self) -> float:
        is_held = self._replies_apart and 0 < len(self._owed) < self._num_connected
        return 0.01 if is_held else 0.0

    def _answer(self, worker: DraftWorker, asking: list[tuple[Peer, ProposalRequest]]) -> None:
        self.replies[len(asking)] += 1
        super()._answer(worker, asking)

    def _work_ahead(self, begin: float) -> None:
        self.bursts[len(self._owed)] += 1
        super()._work_ahead(begin)

    @property
    def _num_connected(self) -> int:
        return sum(peer.worker is not None for peer in self._peers)


class FlakyLink(Link):
    """Breaks by chance when a reply is due: it is never seen, and whether it was on its way is open."""

    def __init__(self, connection: socket.socket, share: float, rng: random.Random) -> None:
        super().__init__(connection, timeout_s=TIMEOUT_S)
        self._share, self._rng = share, rng

    def receive(self) -> Message:
        if self._rng.random() < self._share:
            raise LinkError("broken by the test")
        return super().receive()


class WaitedForDialer(Dialer):
    """Whoever asks for a link has none for some rounds, and then waits until there is one."""

    num_rounds = 5

    def take(self, timeout_s: float = 0.0) -> Link | None:
        self.num_rounds -= 1
        is_due = self.num_rounds < 0 and not self._is_closed.is_set()
        return super().take(TIMEOUT_S) if is_due else None

    def close(self) -> None:
        self._is_closed.set()
        if (link := super().take()) is not None:
            link.close()


class SharedReplicas(Harness):
    """The harness with ``num_groups`` target groups, to which the requests are dealt in turn, and a draft or
    two. ``total``: the statistics of all of them; ``lost``: the groups that have lost their draft, in order;
    ``returned``: those that turned to their own again."""

    num_groups = 2
    # Share of replies before which a link breaks, and of calls to the draft that are not answered.
    broken_share = unanswered_share = 0.0
    decodes_alone = True
    replies_apart = False
    # With two, a group that looks for a draft has the other one first, and some rounds later its own.
    num_drafts = 1

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found: list[Completion] = []
        failures: list[BaseException] = []
        self.total = Stats()
        self.lost: list[int] = []
        self.returned: list[int] = []
        with contextlib.ExitStack() as stack:
            servers, addresses = [], []
            for _ in range(self.num_drafts):
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind("")  # an abstract name that the system chooses
                listener.listen(64)
                addresses.append(listener.getsockname())
                servers.append(self._new_server(listener))
            self.server = servers[0]
            ended = threading.Event()
            serving = [
                self._thread(lambda server=server: server.run(ended.is_set), failures) for server in servers
            ]
            parts = [list(requests[group :: self.num_groups]) for group in range(self.num_groups)]
            threads = [
                self._thread(
                    lambda group=group, part=part: found.extend(self._group(group, part, addresses)), failures
                )
                for group, part in enumerate(parts)
            ]
            for thread in threads:
                thread.join()
            ended.set()
            for thread in serving:
                thread.join()
        if failures:
            raise failures[0]
        order = {(r.row_id, r.sample_index): index for index, r in enumerate(requests)}
        return sorted(found, key=lambda c: order[c.request.row_id, c.request.sample_index])

    def _new_server(self, listener: socket.socket) -> MeetingServer:
        sizes = GroupSizes(
            num_groups=self.num_groups, num_slots=self.scheduling.num_slots, num_pages=self.num_pages
        )
        runner = cast(ModelRunner, MarkovRunner(self.runners[1].model))  # type: ignore[arg-type]
        self.assembly.allocate_draft(
            runner,
            num_branch_slots=sizes.num_slots * self.ahead.num_branches,
            max_branch_tokens=self.ahead.num_tokens,
            num_groups=self.num_groups,
        )
        clock = Timeline("transfer")
        worker = self.assembly.draft_worker(runner, self.policy, clock, num_groups=self.num_groups)

        def worker_for(greeting: Mapping[str, Any]) -> tuple[DraftWorker, dict[str, Any]]:
            return worker, {}

        return MeetingServer([listener], sizes, worker_for, clock=clock, replies_apart=self.replies_apart)

    def _thread(self, run: Callable[[], object], failures: list[BaseException]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _group(self, group: int, requests: list[Request], addresses: list[Any]) -> list[Completion]:
        rng = random.Random(group)

        def dial(draft: int) -> Link:
            if rng.random() < self.unanswered_share:
                raise LinkError("no answer, by the test")
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(addresses[draft])
            link = FlakyLink(connection, 0.0, rng)
            link.send(Message.of_values(Kind.GREETING, {"group": group}))
            assert link.receive().kind is Kind.WELCOME
            link._share = self.broken_share
            link.draft = draft
            return link

        def new_draft(link: Link) -> Proposer:
            if self.num_drafts > 1 and link.draft == 0:
                self.returned.append(group)
            draft = LinkedDraft(link)
            return DraftOnDemand(draft, max_missed_tokens=20) if self.shapes else draft

        proposer = SharedDraft(
            Dialer(partial(dial, self.num_drafts - 1), retry_s=0.001),
            new_draft,
            decodes_alone=self.decodes_alone,
            repeats_blocks=self.settings.is_random,
            first_wait_s=TIMEOUT_S,
            longest_wait_s=TIMEOUT_S,
            on_loss=lambda: self.lost.append(group),
            new_own_dialer=lambda: WaitedForDialer(partial(dial, 0), retry_s=0.001),
        )
        runner = MarkovRunner(self.runners[0].model)  # type: ignore[arg-type]
        self.assembly.allocate(cast(ModelRunner, runner))
        pages, stats_recorder = self.assembly.page_table(), StatsRecorder()
        engine = self.assembly.engine(
            iter(requests),
            target=self.assembly.local_target(cast(ModelRunner, runner)),
            proposer=proposer,
            stats_recorder=stats_recorder,
            pages=pages,
        )
        try:
            completions = list(engine.run())
        finally:
            proposer.close()
        self.total.add(stats_recorder.close_shard(0))
        assert pages.num_available == pages.num_pages, "a finished row kept its pages"
        return completions
