"""Several target groups and the draft that they share, in one process: an engine each in a thread of its own.

The draft waits until every group that has connected has asked, so that their requests meet in every burst.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from specdist.engine.draft_server import DraftServer, Peer
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.grouping import GroupSizes
from specdist.engine.interfaces import Proposer
from specdist.engine.on_demand import DraftOnDemand
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
    """Serves requests when all groups have asked. ``bursts`` counts how many were served together."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, poll_s=0.01)
        self.bursts: Counter[int] = Counter()
        self.num_groups = 1

    def _serve(self, peers: list[Peer]) -> None:
        asking = [peer for peer in peers if peer.requests[0].kind is Kind.REQUEST]
        others = [peer for peer in peers if peer not in asking]
        if asking and len(asking) == sum(peer.worker is not None for peer in self._peers):
            self.bursts[len(asking)] += 1
            others += asking
        super()._serve(others)


class FlakyLink(Link):
    """Breaks by chance when a reply is due: it is never seen, and whether it was on its way is open."""

    def __init__(self, connection: socket.socket, share: float, rng: random.Random) -> None:
        super().__init__(connection, timeout_s=TIMEOUT_S)
        self._share, self._rng = share, rng

    def receive(self) -> Message:
        if self._rng.random() < self._share:
            raise LinkError("broken by the test")
        return super().receive()


class SharedReplicas(Harness):
    """The harness with ``num_groups`` target groups, to which the requests are dealt in turn, and one draft.
    ``total``: the statistics of all of them; ``lost``: the groups that have lost it, in order."""

    num_groups = 2
    # Share of replies before which a link breaks, and of calls to the draft that are not answered.
    broken_share = unanswered_share = 0.0
    decodes_alone = True

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        sizes = GroupSizes(
            num_groups=self.num_groups, num_slots=self.scheduling.num_slots, num_pages=self.num_pages
        )
        runner = self.runners[1]
        self.assembly.allocate_draft(
            runner,
            num_branch_slots=sizes.num_slots * self.ahead.num_branches,
            max_branch_tokens=self.ahead.num_tokens,
            num_groups=self.num_groups,
        )
        clock = Timeline("transfer")
        worker = self.assembly.draft_worker(runner, self.policy, clock, num_groups=self.num_groups)
        found: list[Completion] = []
        failures: list[BaseException] = []
        self.total = Stats()
        self.lost: list[int] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # an abstract name that the system chooses
            listener.listen(64)
            address = listener.getsockname()

            def worker_for(greeting: Mapping[str, Any]) -> tuple[DraftWorker, dict[str, Any]]:
                return worker, {}

            self.server = MeetingServer([listener], sizes, worker_for, clock=clock)
            ended = threading.Event()
            serving = self._thread(lambda: self.server.run(ended.is_set), failures)
            parts = [list(requests[group :: self.num_groups]) for group in range(self.num_groups)]
            threads = [
                self._thread(lambda group=group, part=part: found.extend(self._group(group, part, address)),
                             failures)
                for group, part in enumerate(parts)
            ]  # fmt: skip
            for thread in threads:
                thread.join()
            ended.set()
            serving.join()
        if failures:
            raise failures[0]
        order = {(r.row_id, r.sample_index): index for index, r in enumerate(requests)}
        return sorted(found, key=lambda c: order[c.request.row_id, c.request.sample_index])

    def _thread(self, run: Callable[[], object], failures: list[BaseException]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _group(self, group: int, requests: list[Request], address: Any) -> list[Completion]:
        rng = random.Random(group)

        def dial() -> Link:
            if rng.random() < self.unanswered_share:
                raise LinkError("no answer, by the test")
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address)
            link = FlakyLink(connection, 0.0, rng)
            link.send(Message.of_values(Kind.GREETING, {"group": group}))
            assert link.receive().kind is Kind.WELCOME
            link._share = self.broken_share
            return link

        def new_draft(link: Link) -> Proposer:
            draft = LinkedDraft(link)
            return DraftOnDemand(draft, max_missed_tokens=20) if self.shapes else draft

        proposer = SharedDraft(
            Dialer(dial, retry_s=0.001),
            new_draft,
            decodes_alone=self.decodes_alone,
            repeats_blocks=self.settings.is_random,
            first_wait_s=TIMEOUT_S,
            longest_wait_s=TIMEOUT_S,
            on_loss=lambda: self.lost.append(group),
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
