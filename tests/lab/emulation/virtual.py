"""The emulation in virtual time: the real engine, draft and policies, with clocks that only passes and hosts
of a known pace move. A result costs no quiet machine, and is the same on every one.

Each side has a host and a device. A host that reads a result waits for its device; a message takes its time
from one host to the other. With a draft on the target's GPUs there is one of each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor

from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.timeline import Timeline
from specdist.lab.plan.roofline import Placement
from specdist.lab.plan.simulate import OWN_GPU, Mode, ReplicaCosts
from specdist.models.passes.runner import ModelRunner
from specdist.policies.payoff import LEAST_SHARE
from specdist.sampling.distributions import Dense
from tests.lab.emulation.device import NS_PER_MS, EmulatedDevice
from tests.lab.emulation.markov import MarkovPair
from tests.lab.emulation.runner import EmulatedRunner, Pace
from tests.lab.emulation.session import Window
from tests.lab.emulation.sides import EmulatedOrder, ObservedTarget, new_draft, timeline

# A request and its reply; the target's host between two passes; the draft's beside its steps, synchronous
# and asynchronous: as on two cores of a server, jobs/benchmarks/tables/host-times.md. The main job assumes
# half.
MESSAGE_NS, ROUND_NS, SYNCHRONOUS_NS, ASYNCHRONOUS_NS = 300_000, 500_000, 600_000, 2_000_000


@dataclass
class VirtualDevice(EmulatedDevice):
    """``now_ns``: of its host."""

    now_ns: int = 0

    def queue(self, duration_ns: int, asked_ns: int = 0) -> None:
        del asked_ns  # of the real clock
        begin = max(self.now_ns, self.free_at_ns)
        self.free_at_ns = begin + duration_ns
        self.passes.append((begin, self.free_at_ns))

    def wait_until(self, moment_ns: int) -> None:
        self.now_ns = max(self.now_ns, moment_ns)

    def new_event(self) -> Any:
        return VirtualEvent(self)


@dataclass
class VirtualEvent:
    """See :class:`tests.lab.emulation.device.EmulatedEvent`."""

    device: VirtualDevice
    at_ns: int = field(default=0)

    def record(self) -> None:
        self.at_ns = max(self.device.now_ns, self.device.free_at_ns)

    def query(self) -> bool:
        return self.device.now_ns >= self.at_ns

    def synchronize(self) -> None:
        self.device.wait_until(self.at_ns)

    def elapsed_time(self, end_event: Any) -> float:
        return float((end_event.at_ns - self.at_ns) / NS_PER_MS)


class VirtualRank:
    """A draft on a rank of its own. Its host takes time where it drafts: before its reply, or ahead."""

    def __init__(self, worker: DraftWorker, own: VirtualDevice, target: VirtualDevice) -> None:
        self._worker, self._own, self._target = worker, own, target

    def ask(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        if request.next_distributions_W is not None:
            self._target.wait()
            rows_WV = request.next_distributions_W.probabilities_NV.as_subclass(Tensor)
            request = dataclasses.replace(request, next_distributions_W=Dense(rows_WV))
        self._own.wait_until(self._target.now_ns + MESSAGE_NS // 2)
        num_passes = len(self._own.passes)
        reply = self._worker.respond(request)
        if len(self._own.passes) > num_passes:
            self._own.now_ns += SYNCHRONOUS_NS
        self._target.wait_until(self._own.now_ns + MESSAGE_NS // 2)
        num_passes = len(self._own.passes) + (len(request.context) > 0)
        self._worker.prefill_and_draft_ahead(request)
        if len(self._own.passes) > num_passes:
            self._own.now_ns += ASYNCHRONOUS_NS
        return reply

    def tell(self, request: ProposalRequest | None) -> None:
        if request is not None:
            self._own.wait_until(self._target.now_ns + MESSAGE_NS // 2)
            self._worker.follow(request)


class _PacedTarget(ObservedTarget):
    def forward(self, updates: Any, verify_input: Any) -> Any:
        cast(VirtualDevice, self._device).now_ns += ROUND_NS
        return super().forward(updates, verify_input)


def planned_host_times(costs: ReplicaCosts, mode: Mode) -> ReplicaCosts:
    """The planner's costs with the same times."""
    proposal_ns = (mode in OWN_GPU) * MESSAGE_NS + (mode == "synchronous") * SYNCHRONOUS_NS
    return dataclasses.replace(costs, round_s=ROUND_NS / 1e9, proposal_s=proposal_ns / 1e9)


class VirtualRun:
    """One engine in virtual time."""

    def __init__(
        self,
        order: EmulatedOrder,
        pair: MarkovPair,
        target: Placement,
        draft: Placement,
        *,
        has_own_gpu: bool,
    ) -> None:
        self.order = order
        self.device = VirtualDevice()
        draft_device = VirtualDevice() if has_own_gpu else self.device
        self.runner = EmulatedRunner(pair.target, Pace(target), self.device)
        model_runner = cast(ModelRunner, self.runner)
        self._assembly = dataclasses.replace(order.assembly, stop_rules=StopRules(NO_TEXT))
        self._assembly.allocate(model_runner)
        self.runner.fill(order.num_full, order.prompt_tokens)
        local_target = self._assembly.local_target(model_runner)
        self.target = _PacedTarget(local_target, self.device)
        self.proposer: Proposer = Draft()
        if order.choice.max_draft_tokens:
            runner = EmulatedRunner(pair.draft, Pace(draft), draft_device)
            worker = new_draft(order, runner, timeline("idle", draft_device), may_be_skipped=not has_own_gpu)
            rank = VirtualRank(worker, draft_device, self.device)
            channel = rank if has_own_gpu else InProcess(worker)
            self.proposer = self._assembly.draft(channel, least_share=LEAST_SHARE * worker.is_lazy)

    def engine(self, requests: list[Request]) -> Engine:
        return self._assembly.engine(
            iter(requests),
            target=self.target,
            proposer=self.proposer,
            stats_recorder=StatsRecorder(),
            clock=timeline("host", self.device),
        )

    def steady_rounds(self, num_rounds: int, num_rows: int) -> tuple[int, float]:
        """Tokens and seconds of so many rounds of a full batch, of at most ``num_rows`` requests."""
        window = Window(self.runner, self.order.assembly.scheduling, num_rounds)
        engine = self.engine(self._requests(num_rows))
        for _ in engine.run(lambda: window.should_stop(engine, len(self.target.pass_numbers))):
            pass
        begins = np.array(self.device.passes)[window.passes_of(self.target), 0]
        return window.num_tokens, float(begins[-1] - begins[0]) / 1e9

    def _requests(self, num_rows: int) -> list[Request]:
        """The first ones are as far on as in a batch that has run for long."""
        scheduling, num_prompt = self._assembly.scheduling, self.order.prompt_tokens
        num_slots, num_new = self.order.num_full, scheduling.max_new_tokens
        generator = np.random.default_rng(scheduling.seed)
        ids = generator.integers(self._assembly.vocab_size, size=num_prompt + num_new)
        found = []
        for row in range(num_rows):
            done = row * num_new // num_slots if row < num_slots else 0
            prompt = np.roll(ids, row)[: num_prompt + done].tolist()
            found.append(
                Request(row_id=row, sample_index=0, prompt_ids=prompt, max_new_tokens=num_new - done)
            )
        return found
