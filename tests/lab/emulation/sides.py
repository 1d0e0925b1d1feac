"""The two sides of an emulated run, the target's and the draft's, and what both must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from specdist.engine.assembly import Assembly
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.messages.interfaces import Target, VerifyInput, VerifyOutput
from specdist.engine.times.timeline import DeviceClock, Kind, Timeline
from specdist.models.cache.pages import PageUpdates
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import CostModel
from specdist.policies.registry import PolicyChoice, build_policy
from tests.lab.emulation.device import EmulatedDevice
from tests.lab.emulation.runner import EmulatedRunner


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

    def close(self) -> None:
        self._target.close()
