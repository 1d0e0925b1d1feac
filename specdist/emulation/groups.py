"""Emulated targets that share a draft: a process for each, and one for the draft; real messages over sockets.

The targets begin together, each with a batch of its own. What counts is the time in which all of them are in
their steady rounds. There may be more processes than cores: whoever waits for its device then sleeps, and the
CPU time of all is measured, so that a result can say whether the cores were enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from specdist.emulation.accounting import round_times
from specdist.emulation.device import EmulatedDevice
from specdist.emulation.markov import PairSettings, markov_pair
from specdist.emulation.rows import RowSettings, open_rows
from specdist.emulation.runner import EmulatedRunner, Pace
from specdist.emulation.session import Run, Window
from specdist.emulation.sides import (
    EmulatedOrder,
    ObservedDraft,
    ObservedProposer,
    ObservedTarget,
    Recording,
    SideLog,
    new_draft,
    timeline,
)
from specdist.engine.draft_server import DraftServer
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.engine import Engine
from specdist.engine.grouping import GroupSizes
from specdist.engine.shared_draft import LinkedDraft
from specdist.engine.sockets import Kind, Link, Message
from specdist.models.runner import ModelRunner
from specdist.planning.roofline import Placement
from specdist.utils.errors import UserError

# A reply that takes longer means that something has failed.
TIMEOUT_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """``runs``: of every target. ``cores_used``: CPU seconds of all processes per second."""

    runs: Sequence[Run]
    cores_used: float


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """All that the processes are given. ``folder``: where they tell each other how far they are."""

    pair: PairSettings
    target: Placement
    draft: Placement
    order: EmulatedOrder
    rows: RowSettings
    num_targets: int
    num_rounds: int
    slowdown: int = 1
    folder: str = ""

    @property
    def device(self) -> EmulatedDevice:
        num_cores = len(os.sched_getaffinity(0))
        return EmulatedDevice(spins=self.num_targets + 1 <= num_cores)


@dataclass(frozen=True, kw_only=True)
class _TargetLog:
    """``counts``: tokens of all sequences by then, by number of passes; measured from ``first`` to
    ``last``."""

    counts: dict[int, int]
    pass_numbers: list[int]
    log: SideLog
    first: int
    last: int
    cpu_share: float

    def begin_ns(self, number: int) -> int:
        """Of a pass."""
        return int(self.log.passes_P2[self.pass_numbers[number], 0])

    def run(self, begin_ns: int, end_ns: int, draft: SideLog) -> Run:
        """The rounds within this time."""
        numbers = [n for n in range(self.first, self.last + 1) if begin_ns <= self.begin_ns(n) <= end_ns]
        edges_R1 = np.array([self.begin_ns(number) for number in numbers])
        return Run(
            num_tokens=self.counts[numbers[-1]] - self.counts[numbers[0]],
            edges_R1=edges_R1,
            # A draft at work may be at work for another target: the host's time is what neither accounts for.
            times=round_times(edges_R1, self.log, draft, works_ahead=False),
            target=self.log,
            draft=draft,
        )


class _SharedWindow(Window):
    """Measures from when all targets' batches are full until all have had their rounds."""

    def __init__(self, case: SharedCase, group: int, runner: EmulatedRunner) -> None:
        super().__init__(runner, case.order.assembly.scheduling, case.num_rounds)
        self._case, self._group = case, group
        self._told: set[str] = set()
        self.counts: dict[int, int] = {}
        self.last_pass = 0

    def should_stop(self, engine: Engine, num_passes: int) -> bool:
        super().should_stop(engine, num_passes)
        self.counts[num_passes] = self._count()
        if not self._runner.is_full or not self._all("full"):
            # The steady rounds begin later.
            self._num_before_full = num_passes
            return False
        if self._is_begun and num_passes - self.first_pass >= self._num_rounds:
            self.last_pass = num_passes
            return self._all("done")
        return False

    def _all(self, event: str) -> bool:
        """Tell that this target is so far, and whether all are."""
        folder = Path(self._case.folder)
        if event not in self._told:
            self._told.add(event)
            (folder / f"{event}-{self._group}").touch()
        return all((folder / f"{event}-{group}").exists() for group in range(self._case.num_targets))


def run_shared(case: SharedCase) -> SharedRun:
    """Raises :class:`UserError` if a process fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        case = dataclasses.replace(case, folder=folder)
        draft = stack.enter_context(_process(_serve, case))
        address = _received([draft])[0]
        targets = [
            stack.enter_context(_process(_generate, case, group, address))
            for group in range(case.num_targets)
        ]
        logs: list[_TargetLog] = _received(targets)
        draft.send(None)
        draft_log, cpu_share = _received([draft])[0]
    begin_ns = max(log.begin_ns(log.first) for log in logs)
    end_ns = min(log.begin_ns(log.last) for log in logs)
    return SharedRun(
        runs=[log.run(begin_ns, end_ns, draft_log) for log in logs],
        cores_used=cpu_share + sum(log.cpu_share for log in logs),
    )


@contextlib.contextmanager
def _process(main: Callable[..., Any], *arguments: Any) -> Iterator[Connection]:
    # As the draft's process of other modes is started: specdist.benchmark.draft_rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_guarded, args=(main, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()


def _guarded(main: Callable[..., Any], pipe: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(main(pipe, *arguments))
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send(UserError(f"an emulated process has failed: {traceback.format_exc()}"))


def _received(pipes: Sequence[Connection]) -> list[Any]:
    """A message of each. Raises the first error, or :class:`UserError` for a process that has died."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        for pipe in wait([pipe for index, pipe in enumerate(pipes) if index not in found]):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                raise UserError("an emulated process has died, often because memory ran out") from None
            if isinstance(message, Exception):
                raise message
            found[pipes.index(pipe)] = message
    return [found[index] for index in range(len(pipes))]


def _serve(pipe: Connection, case: SharedCase) -> tuple[SideLog, float]:
    """The draft's process."""
    device = case.device
    recording, clock = Recording(device), timeline("transfer", device)
    runner = EmulatedRunner(markov_pair(case.pair).draft, Pace(case.draft, case.slowdown), device)
    worker = ObservedDraft(new_draft(case.order, runner, clock, num_groups=case.num_targets), recording)
    scheduling = case.order.assembly.scheduling
    sizes = GroupSizes(
        num_groups=case.num_targets, num_slots=scheduling.num_slots, num_pages=case.order.assembly.num_pages
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen(case.num_targets)
        pipe.send(listener.getsockname())
        server = DraftServer(
            [listener], sizes, lambda _: (cast(DraftWorker, worker), {}), clock=clock, poll_s=POLL_S
        )
        begin, cpu_begin = time.monotonic(), time.process_time()
        server.run(pipe.poll)
    return recording.log(), (time.process_time() - cpu_begin) / (time.monotonic() - begin)


def _generate(pipe: Connection, case: SharedCase, group: int, address: bytes) -> _TargetLog:
    """A target's process."""
    device = case.device
    recording = Recording(device)
    runner = EmulatedRunner(markov_pair(case.pair).target, Pace(case.target, case.slowdown), device)
    order = case.order
    with open_rows(case.rows) as rows, socket.socket(socket.AF_UNIX) as connection:
        assembly = dataclasses.replace(order.assembly, stop_rules=rows.stop_rules)
        assembly.allocate(cast(ModelRunner, runner))
        runner.fill(order.num_full, order.prompt_tokens)
        connection.connect(address)
        link = Link(connection, timeout_s=TIMEOUT_S)
        link.send(Message.of_values(Kind.GREETING, {"group": group}))
        assert link.receive().kind is Kind.WELCOME
        target = ObservedTarget(assembly.local_target(cast(ModelRunner, runner)), recording, device)
        window = _SharedWindow(case, group, runner)
        engine = assembly.engine(
            rows.requests(),
            target=target,
            proposer=assembly.asked_when_it_pays(ObservedProposer(LinkedDraft(link), recording)),
            stats_recorder=rows.stats_recorder,
            clock=timeline("host", device),
        )
        begin, cpu_begin = time.monotonic(), time.process_time()
        for completion in engine.run(lambda: window.should_stop(engine, len(target.pass_numbers))):
            rows.recorder.record(completion)
        cpu_share = (time.process_time() - cpu_begin) / (time.monotonic() - begin)
    if not window.last_pass:
        raise RuntimeError("the requests ended before all rounds were measured")
    # The last one that was counted may have had no pass any more.
    last = min(window.last_pass, len(target.pass_numbers) - 1)
    return _TargetLog(
        counts=window.counts,
        pass_numbers=target.pass_numbers,
        log=recording.log(),
        first=window.first_pass,
        last=last,
        cpu_share=cpu_share,
    )
