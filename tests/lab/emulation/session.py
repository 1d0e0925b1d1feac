"""The emulated replica: one engine after another, each measured while its batch is full."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from specdist.engine.draft.client import Draft, InProcess
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer
from specdist.engine.request import Completion, Sequence
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.lab.plan.roofline import Placement
from specdist.models.passes.runner import ModelRunner
from tests.lab.emulation.accounting import RoundTimes, SideLog, round_times
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.draft_rank import DraftRank
from tests.lab.emulation.markov import MarkovPair
from tests.lab.emulation.rows import EmulatedRows
from tests.lab.emulation.runner import EmulatedRunner, Pace
from tests.lab.emulation.sides import (
    EmulatedOrder,
    ObservedTarget,
    half_of_the_cores,
    log_of,
    new_draft,
    timeline,
)

# Rounds before the first that is measured, and after the last.
NUM_WARMUPS = 8
ALL_TOKENS = 2**30


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine did in its steady rounds.

    Attributes:
        num_tokens: emitted in these rounds.
        times: see :func:`tests.lab.emulation.accounting.round_times`.
    """

    num_tokens: int
    times: RoundTimes
    target: SideLog
    draft: SideLog | None


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


class Replica:
    """The target's side of all engines; ``rank`` is that of a draft with a GPU of its own."""

    def __init__(self, pair: MarkovPair, target: Placement, draft: Placement, rank: DraftRank | None) -> None:
        self._device = EmulatedDevice()
        self._target = EmulatedRunner(pair.target, Pace(target), self._device)
        self._draft = EmulatedRunner(pair.draft, Pace(draft), self._device)
        self._rank = rank

    def run(
        self,
        order: EmulatedOrder,
        rows: EmulatedRows,
        *,
        num_rounds: int,
        on_own_rank: bool,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> Run:
        """Generate until so many rounds of a full batch have been measured.

        Raises RuntimeError if there are too few requests.
        """
        device = self._device
        assembly = dataclasses.replace(order.assembly, stop_rules=rows.stop_rules)
        device.forget()
        assembly.allocate(cast(ModelRunner, self._target))
        self._target.fill(order.num_full, order.prompt_tokens)
        target = ObservedTarget(assembly.local_target(cast(ModelRunner, self._target)), device)
        window = Window(self._target, assembly.scheduling, num_rounds)
        with half_of_the_cores(0), self._proposer(order, on_own_rank=on_own_rank) as proposer:
            engine = assembly.engine(
                rows.requests(),
                target=target,
                proposer=proposer,
                stats_recorder=rows.stats_recorder,
                clock=timeline("host", device),
            )
            for completion in engine.run(lambda: window.should_stop(engine, len(target.pass_numbers))):
                rows.recorder.record(completion)
                if on_completion is not None:
                    on_completion(completion)
        draft_log = self._rank.call("log") if self._rank is not None and on_own_rank else None
        target_log = log_of(device)
        edges_R1 = target_log.passes_P2[window.passes_of(target), 0]
        return Run(
            num_tokens=window.num_tokens,
            times=round_times(edges_R1, target_log, draft_log, is_asynchronous=assembly.ahead.num_ahead > 0),
            target=target_log,
            draft=draft_log,
        )

    @contextlib.contextmanager
    def _proposer(self, order: EmulatedOrder, *, on_own_rank: bool) -> Iterator[Proposer]:
        if not order.choice.max_draft_tokens:
            yield Draft()
        elif on_own_rank:
            assert self._rank is not None
            self._rank.call("build", order)
            with self._rank.serving() as channel:
                yield order.assembly.draft(channel)
        else:
            worker = new_draft(order, self._draft, timeline("idle", self._device))
            yield order.assembly.draft(InProcess(worker))
