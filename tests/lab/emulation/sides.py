"""The two sides of an emulated run: the target's in this process, the draft's here or on a rank of its own.

Both keep a log: when their devices worked, when they waited for them, and how much of their own time they had
used by then.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from specdist.engine.assembly import Assembly
from specdist.engine.draft.channels import serve_draft
from specdist.engine.draft.client import Channel
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages import link
from specdist.engine.messages.interfaces import Target, VerifyInput, VerifyOutput
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.target.collectives import RANK_ZERO
from specdist.engine.times.reports import Traffic
from specdist.engine.times.timeline import DeviceClock, Kind, Timeline
from specdist.lab.plan.roofline import Placement
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import PairSettings, markov_pair
from tests.lab.emulation.runner import EmulatedRunner, Pace

CPU = torch.device("cpu")


@contextlib.contextmanager
def half_of_the_cores(half: int) -> Iterator[None]:
    """The target's process keeps to the first half of the cores, the draft's to the second, as ranks keep to
    those next to their GPUs. Else a message may be handled on its sender's core, which then waits."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield
        return
    middle = len(cores) // 2
    os.sched_setaffinity(0, cores[middle:] if half else cores[:middle])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(frozen=True)
class SideLog:
    """Of one side; all times are those of ``time.monotonic_ns``.

    Attributes:
        passes_P2: begin and end of the device's passes.
        waits_W2: of the host's waits, for the device and for the other side's messages.
        spans_S2: of the draft's side, from a request to its reply.
        marks_M2: moments, and the host's own CPU time until then, without waiting and without the work that
            stands in for the device's.
        num_slow: passes for which that work took longer than the pass.
    """

    passes_P2: np.ndarray
    waits_W2: np.ndarray
    spans_S2: np.ndarray
    marks_M2: np.ndarray
    num_slow: int


class Recording:
    """Builds a side's log."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._marks: list[tuple[int, int]] = []
        self.spans: list[tuple[int, int]] = []
        self.message_waits: list[tuple[int, int]] = []

    def busy_wait(self, connection: socket.socket) -> None:
        """As a rank with a device waits for a message."""
        begin = time.monotonic_ns()
        link.busy_wait(connection)
        self._device.spun_ns += time.monotonic_ns() - begin

    def mark(self) -> int:
        """Returns the moment."""
        now, device = time.monotonic_ns(), self._device
        self._marks.append((now, time.thread_time_ns() - device.spun_ns - device.stand_in_ns))
        return now

    def log(self) -> SideLog:
        waits = sorted(self._device.waits + self.message_waits)
        parts = (self._device.passes, waits, self.spans, self._marks)
        arrays = [np.array(part, np.int64).reshape(-1, 2) for part in parts]
        return SideLog(arrays[0], arrays[1], arrays[2], arrays[3], self._device.num_slow)


@dataclass(frozen=True, kw_only=True)
class EmulatedOrder:
    """One engine's run, as both sides must know it.

    Attributes:
        num_full, prompt_tokens, num_rounds: see :meth:`EmulatedRunner.fill`.
        num_branch_slots, max_branch_tokens: room for branches in the draft's page table.
    """

    assembly: Assembly
    choice: PolicyChoice
    costs: CostModel | None
    num_full: int
    prompt_tokens: int
    num_rounds: int
    num_branch_slots: int = 0
    max_branch_tokens: int = 0

    @property
    def block_tokens(self) -> int:
        """Most tokens of a sequence per round."""
        return self.choice.max_draft_tokens + 1


@dataclass(frozen=True, kw_only=True)
class DraftSide:
    """What the draft's process is given; see :class:`tests.lab.draft_rank.RankSource`."""

    pair: PairSettings
    then: PairSettings
    placement: Placement
    slowdown: int = 1
    device: torch.device = CPU
    num_threads: int = 1
    remedy: str = "leave out --modes synchronous asynchronous branches"

    def open(self) -> DraftServer:
        return DraftServer(self)


class DraftServer:
    """The draft of one engine after another, in the process of its own."""

    def __init__(self, side: DraftSide) -> None:
        torch.set_num_threads(side.num_threads)
        self._device = EmulatedDevice()
        model, then = (markov_pair(settings).draft for settings in (side.pair, side.then))
        self._runner = EmulatedRunner(model, Pace(side.placement, side.slowdown), self._device, then)

    def build(self, order: EmulatedOrder) -> None:
        self._device.forget()
        self._recording = Recording(self._device)
        self._order = order
        self._clock = timeline("transfer", self._device)
        self._draft = new_draft(order, self._runner, self._clock)

    def serve(self) -> None:
        """Serve one engine to its end."""
        observed = cast(DraftWorker, ObservedDraft(self._draft, self._recording))
        with half_of_the_cores(1):
            serve_draft(observed, RANK_ZERO, clock=self._clock, wait=self._recording.busy_wait)

    def log(self) -> SideLog:
        """Of the last engine."""
        return self._recording.log()


def new_draft(
    order: EmulatedOrder, runner: EmulatedRunner, clock: Timeline, *, may_be_skipped: bool = False
) -> DraftWorker:
    """A draft without sequences, whose passes take no time until the target's batch is full.
    ``may_be_skipped``: as in one process, where it runs no prompts before something is drafted."""
    model_runner = cast(ModelRunner, runner)
    order.assembly.allocate_draft(model_runner, order.num_branch_slots, order.max_branch_tokens)
    runner.fill(order.num_full, order.prompt_tokens, order.num_rounds)
    settings = order.assembly.settings
    policy = build_policy(order.choice, order.costs, is_coupled=not settings.is_random)
    return order.assembly.draft_worker(model_runner, policy, clock, may_be_skipped=may_be_skipped)


def timeline(rest: Kind, device: EmulatedDevice) -> Timeline:
    """Times by the device's events, as on a GPU."""
    return Timeline(rest, clock=DeviceClock(device.new_event))


class ObservedDraft:
    """A draft that notes when it answers."""

    def __init__(self, draft: DraftWorker, recording: Recording) -> None:
        self._draft = draft
        self._recording = recording
        self.device = draft.device
        self.recover, self.follow = draft.recover, draft.follow
        self._is_done_at = time.monotonic_ns()

    def respond(self, request: ProposalRequest) -> ProposalReply:
        begin = self._recording.mark()
        self._recording.message_waits.append((self._is_done_at, begin))
        reply = self._draft.respond(request)
        self._is_done_at = time.monotonic_ns()
        self._recording.spans.append((begin, self._is_done_at))
        return reply

    def prefill_and_draft_ahead(self, request: ProposalRequest) -> None:
        self._draft.prefill_and_draft_ahead(request)
        self._is_done_at = time.monotonic_ns()


class ObservedChannel:
    """The way to a draft on another rank, which is waited for."""

    def __init__(self, channel: Channel, recording: Recording) -> None:
        self._channel = channel
        self._recording = recording
        self.tell = channel.tell

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        begin = time.monotonic_ns()
        reply = self._channel.ask(request, clock)
        self._recording.message_waits.append((begin, time.monotonic_ns()))
        return reply


class ObservedTarget:
    """A target that notes when its passes begin."""

    is_single_rank = True
    traffic = Traffic()

    def __init__(self, target: Target, recording: Recording, device: EmulatedDevice) -> None:
        self._target = target
        self._recording = recording
        self._device = device
        self.device = target.device
        # Of every pass, its number among those of the device.
        self.pass_numbers: list[int] = []

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self._recording.mark()
        self.pass_numbers.append(len(self._device.passes))
        return self._target.forward(updates, verify_input)

    def close(self) -> None:
        self._target.close()
