"""The draft of an engine of the benchmark, and the assembly that follows from it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from specdist.engine.assembly import Assembly
from specdist.engine.times.timeline import Kind, Timeline, clock_of
from specdist.policies import LengthPolicy
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel
from specdist.policies.payoff import ALONE, RoundShape
from specdist.sampling.distributions import SamplingSettings


def fixed_length(num_draft_tokens: int) -> PolicyChoice:
    """Always this many draft tokens; 0 for the target alone."""
    return PolicyChoice.of("fixed", num_draft_tokens=num_draft_tokens) if num_draft_tokens else PolicyChoice()


def with_slots(assembly: Assembly, num_slots: int) -> Assembly:
    """The same assembly for this many sequences at a time."""
    return dataclasses.replace(
        assembly, scheduling=dataclasses.replace(assembly.scheduling, max_num_seqs=num_slots)
    )


def branches_text(num_branches: int) -> str:
    """The end of a placement's name in tables."""
    return f", {num_branches} branch{'es' * (num_branches > 1)}" if num_branches else ""


@dataclass(frozen=True, kw_only=True)
class DraftOrder:
    """The draft of one engine.

    Attributes:
        choice: its length policy; every engine gets a new policy object.
        costs: for a policy that uses them.
        trace_folder: folder for a trace of each process, with the phases of a round; None for none.
    """

    num_slots: int
    choice: PolicyChoice
    costs: CostModel | None = None
    ahead: RoundShape = ALONE
    trace_folder: str | None = None

    @property
    def name(self) -> str:
        """How the draft works in a process of its own."""
        return ("ahead" if self.ahead.num_ahead else "separate") + branches_text(self.ahead.num_branches)

    def assembly(self, largest: Assembly) -> Assembly:
        """The assembly of this engine, from the one whose caches have room for every order."""
        scheduling = dataclasses.replace(
            largest.scheduling,
            max_num_seqs=self.num_slots,
            max_draft_tokens=self.choice.max_draft_tokens,
            num_ahead_tokens=self.ahead.num_ahead,
        )
        return dataclasses.replace(largest, scheduling=scheduling, ahead=self.ahead)

    def policy(self, settings: SamplingSettings) -> LengthPolicy:
        """A new policy object, which has learned nothing yet."""
        return build_policy(self.choice, self.costs, is_coupled=not settings.is_random)

    def timeline(self, rest: Kind, device: torch.device) -> Timeline:
        """The timeline of one side; ``rest`` is the kind of time outside all phases."""
        annotate = None if self.trace_folder is None else torch.profiler.record_function
        return Timeline(rest, clock=clock_of(device), annotate=annotate)

    @contextlib.contextmanager
    def traced(self, process: str) -> Iterator[None]:
        """With a trace folder, write ``process.json``: all that this process does inside."""
        if self.trace_folder is None:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(Path(self.trace_folder, f"{process}.json")))
