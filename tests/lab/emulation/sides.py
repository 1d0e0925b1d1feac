"""The two sides of an emulated run: the target's in this process, the draft's here or on a rank of its own.

Both keep a log of when their devices worked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from specdist.engine.assembly import Assembly
from specdist.engine.draft.client import serve_draft
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages import link
from specdist.engine.messages.interfaces import Target, VerifyInput, VerifyOutput
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.engine.times.timeline import DeviceClock, Kind, Timeline
from specdist.lab.plan.roofline import Placement
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import CostModel
from specdist.policies.registry import PolicyChoice, build_policy
from tests.lab.emulation.accounting import SideLog
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import PairSettings, markov_pair
from tests.lab.emulation.runner import EmulatedRunner, Pace


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


@dataclass(frozen=True, kw_only=True)
class EmulatedOrder:
    """One engine's run, as both sides must know it.

    Attributes:
        num_full, prompt_tokens: see :meth:`EmulatedRunner.fill`.
        num_branch_slots, max_branch_tokens: room for branches in the draft's page table.
    """

    assembly: Assembly
    choice: PolicyChoice
    costs: CostModel | None
    num_full: int
    prompt_tokens: int
    num_branch_slots: int = 0
    max_branch_tokens: int = 0


class DraftServer:
    """The draft of one engine after another, in the process of its own."""

    def __init__(self, pair: PairSettings, placement: Placement) -> None:
        torch.set_num_threads(1)
        self._device = EmulatedDevice()
        self._runner = EmulatedRunner(markov_pair(pair).draft, Pace(placement), self._device)

    def build(self, order: EmulatedOrder) -> None:
        self._device.forget()
        self._clock = timeline("transfer", self._device)
        self._draft = ObservedDraft(new_draft(order, self._runner, self._clock))

    def serve(self) -> None:
        """Serve one engine to its end."""
        with half_of_the_cores(1):
            serve_draft(cast(DraftWorker, self._draft), RANK_ZERO, clock=self._clock, wait=link.busy_wait)

    def log(self) -> SideLog:
        """Of the last engine."""
        return log_of(self._device, self._draft.spans)


def new_draft(
    order: EmulatedOrder, runner: EmulatedRunner, clock: Timeline, *, may_be_skipped: bool = False
) -> DraftWorker:
    """A draft without sequences, whose passes take no time until the target's batch is full.
    ``may_be_skipped``: as in one process, where it runs no prompts before something is drafted."""
    model_runner = cast(ModelRunner, runner)
    order.assembly.allocate_draft(model_runner, order.num_branch_slots, order.max_branch_tokens)
    runner.fill(order.num_full, order.prompt_tokens)
    settings = order.assembly.settings
    policy = build_policy(order.choice, order.costs, is_coupled=not settings.is_random)
    return order.assembly.draft_worker(model_runner, policy, clock, may_be_skipped=may_be_skipped)


def timeline(rest: Kind, device: EmulatedDevice) -> Timeline:
    """Times by the device's events, as on a GPU."""
    return Timeline(rest, clock=DeviceClock(device.new_event))


class ObservedDraft:
    """A draft that notes when it answers."""

    def __init__(self, draft: DraftWorker) -> None:
        self._draft = draft
        self.device = draft.device
        self.follow = draft.follow
        self.prefill_and_draft_ahead = draft.prefill_and_draft_ahead
        # From a request to its reply.
        self.spans: list[tuple[int, int]] = []

    def respond(self, request: ProposalRequest) -> ProposalReply:
        begin = time.monotonic_ns()
        reply = self._draft.respond(request)
        self.spans.append((begin, time.monotonic_ns()))
        return reply


class ObservedTarget:
    """A target that notes when its passes begin."""

    def __init__(self, target: Target, device: EmulatedDevice) -> None:
        self._target = target
        self._device = device
        self.device = target.device
        # Of every pass, its number among those of the device.
        self.pass_numbers: list[int] = []

    def forward(self, updates: PageUpdates, verify_input: VerifyInput) -> VerifyOutput:
        self.pass_numbers.append(len(self._device.passes))
        return self._target.forward(updates, verify_input)

    def check(self) -> None:
        self._target.check()

    def close(self) -> None:
        self._target.close()


def log_of(device: EmulatedDevice, spans: Sequence[tuple[int, int]] = ()) -> SideLog:
    """What a side has done; ``spans``: of its replies."""
    passes_P2, spans_S2 = (np.array(part, np.int64).reshape(-1, 2) for part in (device.passes, spans))
    return SideLog(passes_P2, spans_S2, device.num_slow)
