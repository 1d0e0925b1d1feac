"""One engine's run in virtual time: the real engine, draft and policies, with clocks that only passes and
hosts of a known pace move. A result costs no quiet machine, and is the same on every one.

Each side has a host and a device. A host that reads a result waits for its device; a message takes its time
from one host to the other. With a draft on the target's GPUs there is one of each.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
from torch import Tensor

from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.messages.proposals import ProposalReply, ProposalRequest
from specdist.engine.request import Request, Sequence
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.times.timeline import Timeline
from specdist.lab.plan.roofline import Placement
from specdist.lab.plan.simulate import OWN_GPU, Mode, ReplicaCosts
from specdist.models.passes.runner import ModelRunner
from specdist.policies.payoff import LEAST_SHARE
from specdist.sampling.distributions import Dense
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.markov import MarkovPair
from tests.lab.emulation.runner import EmulatedRunner, Pace
from tests.lab.emulation.sides import EmulatedOrder, ObservedTarget, new_draft, timeline

# Rounds before the first that is measured, and after the last.
NUM_WARMUPS = 8
ALL_TOKENS = 2**30
# A request and its reply; the target's host between two passes; the draft's beside its steps, synchronous
# and asynchronous: as on two cores of a server, jobs/benchmarks/tables/host-times.md. The main job assumes
# half.
MESSAGE_NS, ROUND_NS, SYNCHRONOUS_NS, ASYNCHRONOUS_NS = 300_000, 500_000, 600_000, 2_000_000


class Window:
    """Stops the engine when enough rounds have been measured, and counts their tokens.

    ``first_pass``: number of the target pass with which they begin. Rounds are counted by their passes: the
    round in which a lone sequence ends with its next token has none.
    """

    def __init__(self, runner: EmulatedRunner, limits: SchedulerSettings, num_rounds: int) -> None:
        """``limits``: of the batch, from when it is full; before, all prompts may be in one pass, so that no
        sequence is further on in the measured rounds than in a batch that has run for long."""
        self._runner = runner
        self._limits = limits
        self._num_rounds = num_rounds
        self._num_before_full = 0
        self._is_begun = self._is_over = False
        # By their order of admission.
        self._sequences: dict[int, Sequence] = {}
        self._newest = 0
        self.first_pass = self.num_tokens = 0

    def should_stop(self, engine: Engine, num_passes: int) -> bool:
        """To be called before every round."""
        running = engine.scheduler.running
        # They are in the order of admission.
        if running and running[-1].order > self._newest:
            self._newest = running[-1].order
            self._sequences |= {sequence.order: sequence for sequence in running}
        if not self._runner.is_full:
            self._num_before_full = num_passes
            limits = dataclasses.replace(self._limits, max_num_batched_tokens=ALL_TOKENS)
            engine.scheduler.settings = limits
        elif not self._is_begun:
            engine.scheduler.settings = self._limits
        if not self._is_begun:
            self._is_begun = num_passes >= self._num_before_full + NUM_WARMUPS
            if self._is_begun:
                engine.commit()
                self.first_pass, self.num_tokens = num_passes, -self._count()
            return False
        num_measured = num_passes - self.first_pass
        if num_measured >= self._num_rounds and not self._is_over:
            self._is_over = True
            engine.commit()
            self.num_tokens += self._count()
        # The pass of one more round ends the last one that is measured.
        return num_measured > self._num_rounds

    def passes_of(self, target: ObservedTarget) -> list[int]:
        """Numbers of the measured rounds' target passes, and of the next one, among those of the device.

        Raises RuntimeError if there are too few.
        """
        numbers = target.pass_numbers[self.first_pass : self.first_pass + self._num_rounds + 1]
        if len(numbers) <= self._num_rounds:
            raise RuntimeError("the requests ended before all rounds were measured")
        return numbers

    def _count(self) -> int:
        """Of all sequences so far; one that has ended may not have been made known yet."""
        return sum(sequence.num_completion_tokens for sequence in self._sequences.values())


class VirtualRank:
    """A draft on a rank of its own. Its host takes time where it drafts: before its reply, or ahead."""

    def __init__(self, worker: DraftWorker, own: EmulatedDevice, target: EmulatedDevice) -> None:
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
        self._device.now_ns += ROUND_NS
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
        self.order, self.pair = order, pair
        self.device = EmulatedDevice()
        draft_device = EmulatedDevice() if has_own_gpu else self.device
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
        engine = self.engine(self.requests(num_rows))
        for _ in engine.run(lambda: window.should_stop(engine, len(self.target.pass_numbers))):
            pass
        begins = np.array(self.device.passes)[window.passes_of(self.target), 0]
        return window.num_tokens, float(begins[-1] - begins[0]) / 1e9

    def requests(self, num_rows: int) -> list[Request]:
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
