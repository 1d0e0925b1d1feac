"""The emulation in virtual time: the real engine, draft and policies, with clocks that only passes and hosts
of a known pace move. A result costs no quiet machine, and is the same on every one.

Each side has a host and a device. A host that reads a result waits for its device; a message takes its time
from one host to the other. With a draft on the target's GPUs there is one of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor

from specdist.engine.draft.channels import InProcess
from specdist.engine.draft.client import Draft
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.timeline import Timeline
from specdist.job.costs.measuring import OWN_RANK
from specdist.models.passes.runner import ModelRunner
from specdist.policies.choice import PolicyChoice
from specdist.policies.payoff import LEAST_SHARE
from specdist.sampling.distributions import Dense
from tests.lab.emulation.config import MODE_OPTIONS, TARGET_ONLY, EmulationConfig
from tests.lab.emulation.device import NS_PER_MS, EmulatedDevice
from tests.lab.emulation.drafters import draft_runner
from tests.lab.emulation.markov import markov_pair
from tests.lab.emulation.run import Case, Emulation
from tests.lab.emulation.runner import EmulatedRunner, Pace
from tests.lab.emulation.session import Window
from tests.lab.emulation.sides import EmulatedOrder, ObservedTarget, Recording, new_draft, timeline

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


@dataclass
class _Noting:
    """Notes what each reply brings: see :func:`draining`."""

    proposer: Proposer
    rounds: list[tuple[int, int, int]] = field(default_factory=list)

    def propose(self, request: ProposalRequest, clock: Timeline) -> ProposalReply:
        reply = self.proposer.propose(request, clock)
        num_branches = int(reply.ahead.num_branches_R.sum())
        self.rounds.append((len(reply.num_drafted_R), int(reply.num_drafted_R.sum()), num_branches))
        return reply

    def close(self) -> None:
        self.proposer.close()


class VirtualRun:
    """One engine with a batch of ``config``'s first size."""

    def __init__(self, config: EmulationConfig, mode: str, choice: PolicyChoice) -> None:
        emulation = Emulation(config)
        assert config.batch_sizes is not None
        case = Case(
            batch_size=config.batch_sizes[0],
            mode=MODE_OPTIONS[mode] if choice.max_draft_tokens else TARGET_ONLY,
            choice=choice,
        )
        costs = OWN_RANK.added_to(emulation.costs(case).passes)
        self.config, self.order = config, emulation.order(case, costs)
        self.device = VirtualDevice()
        draft_device = VirtualDevice() if case.has_own_gpu else self.device
        pair = markov_pair(emulation.pair)
        self.runner = EmulatedRunner(pair.target, Pace(emulation.target), self.device)
        self._assembly = dataclasses.replace(self.order.assembly, stop_rules=StopRules(NO_TEXT))
        self._assembly.allocate(cast(ModelRunner, self.runner))
        self.runner.fill(self.order.num_full, self.order.prompt_tokens)
        recording = Recording(self.device)
        local_target = self._assembly.local_target(cast(ModelRunner, self.runner))
        self.target = _PacedTarget(local_target, recording, self.device)
        self.proposer: Proposer = Draft()
        if choice.max_draft_tokens:
            runner = draft_runner(
                emulation.target, emulation.draft, pair.draft, draft_device, has_own_gpu=case.has_own_gpu
            )
            is_rank, device = case.has_own_gpu, self.device
            worker = new_draft(self.order, runner, timeline("idle", draft_device), may_be_skipped=not is_rank)
            channel = VirtualRank(worker, draft_device, device) if is_rank else InProcess(worker)
            self.proposer = self._assembly.draft(channel, least_share=LEAST_SHARE * worker.is_lazy)

    def engine(self, requests: Iterable[Request], proposer: Proposer) -> Engine:
        return self._assembly.engine(
            iter(requests),
            target=self.target,
            proposer=proposer,
            stats_recorder=StatsRecorder(),
            clock=timeline("host", self.device),
        )


def tokens_per_s(config: EmulationConfig, mode: str, choice: PolicyChoice) -> float:
    """Of the steady rounds of a batch of ``config``'s first size."""
    run = VirtualRun(config, mode, choice)
    target, window = run.target, Window(run.runner, run.order.assembly.scheduling, config.rounds)
    engine = run.engine(_requests(config, run.order), run.proposer)
    for _ in engine.run(lambda: window.should_stop(engine, len(target.pass_numbers))):
        pass
    numbers = target.pass_numbers[window.first_pass : window.first_pass + config.rounds + 1]
    if len(numbers) <= config.rounds:
        raise RuntimeError("the requests ended before all rounds were measured")
    begins = np.array(run.device.passes)[numbers, 0]
    return window.num_tokens / float(begins[-1] - begins[0]) * 1e9


def draining(config: EmulationConfig, mode: str, choice: PolicyChoice, *, num_last: int) -> np.ndarray:
    """int [rounds, 3] of a batch that no request follows: sequences that decode, their candidates, and their
    branches of the round before. All but ``num_last`` sequences have a fifth of the others' tokens."""
    run = VirtualRun(config, mode, choice)
    noting, requests = _Noting(run.proposer), _requests(config, run.order)[: run.order.num_full]
    lengths = [config.output_tokens // (1 if row < num_last else 5) for row in range(len(requests))]
    requests = [
        dataclasses.replace(
            request, prompt_ids=request.prompt_ids[: config.prompt_tokens], max_new_tokens=length
        )
        for request, length in zip(requests, lengths, strict=True)
    ]
    for _ in run.engine(requests, noting).run():
        pass
    return np.array(noting.rounds)


def _requests(config: EmulationConfig, order: EmulatedOrder) -> list[Request]:
    """The first ones are as far on as in a batch that has run for long."""
    num_slots, length = order.num_full, config.output_tokens
    num_ended = (config.rounds + 100) * num_slots * (order.block_tokens + 1) // length
    ids = np.random.default_rng(config.seed).integers(config.vocab_size, size=config.prompt_tokens + length)
    found = []
    for row in range(2 * num_slots + num_ended):
        done = row * length // num_slots if row < num_slots else 0
        prompt = np.roll(ids, row)[: config.prompt_tokens + done].tolist()
        found.append(Request(row_id=row, sample_index=0, prompt_ids=prompt, max_new_tokens=length - done))
    return found
