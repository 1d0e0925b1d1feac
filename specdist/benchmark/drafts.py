"""Which draft an engine of the benchmark wants, and how the assembly follows from it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdist.engine.assembly import Assembly
from specdist.engine.device_clock import clock_of
from specdist.engine.proposals import DraftAhead
from specdist.engine.timeline import Kind, Timeline
from specdist.policies import LengthPolicy
from specdist.policies.choice import PolicyChoice, build_policy
from specdist.policies.costs import CostModel
from specdist.sampling.distributions import SamplingSettings


def fixed_length(num_draft_tokens: int) -> PolicyChoice:
    """Always so many draft tokens; with 0 the target alone."""
    return PolicyChoice.of("fixed", num_draft_tokens=num_draft_tokens) if num_draft_tokens else PolicyChoice()


def with_slots(assembly: Assembly, num_slots: int) -> Assembly:
    """The same for so many sequences at a time."""
    return dataclasses.replace(
        assembly, scheduling=dataclasses.replace(assembly.scheduling, max_num_seqs=num_slots)
    )


@dataclass(frozen=True, kw_only=True)
class DraftOrder:
    """The draft of one engine.

    Attributes:
        choice: its length policy, which begins anew with every engine.
        costs: for a policy that decides by them.
        trace_folder: gets a trace of what each process does, with the phases of a round in it; None for none.
    """

    num_slots: int
    choice: PolicyChoice
    costs: CostModel | None = None
    ahead: DraftAhead = field(default_factory=DraftAhead)
    trace_folder: str | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Of one block; 0 for the target alone."""
        return self.choice.max_draft_tokens

    @property
    def name(self) -> str:
        """How the draft works in a process of its own."""
        count = self.ahead.num_branches
        ahead = "ahead" if self.ahead.num_tokens else "separate"
        return ahead + (f", {count} branch{'es' * (count > 1)}" if count else "")

    def assembly(self, largest: Assembly) -> Assembly:
        """That of the order's engine and draft, from the one whose caches have room for every order."""
        scheduling = dataclasses.replace(
            with_slots(largest, self.num_slots).scheduling,
            max_draft_tokens=self.max_draft_tokens,
            num_ahead_tokens=self.ahead.num_tokens,
        )
        return dataclasses.replace(largest, scheduling=scheduling, ahead=self.ahead)

    def policy(self, settings: SamplingSettings) -> LengthPolicy:
        """The order's policy, which has learned nothing yet."""
        return build_policy(self.choice, self.costs, is_coupled=not settings.is_random)

    def timeline(self, rest: Kind, device: torch.device) -> Timeline:
        """Of one side; ``rest`` is what happens outside of all phases."""
        annotate = None if self.trace_folder is None else torch.profiler.record_function
        return Timeline(rest, clock=clock_of(device), annotate=annotate)

    @contextlib.contextmanager
    def traced(self, process: str) -> Iterator[None]:
        """Where a trace is wanted, write ``process.json`` of all that this process does inside."""
        if self.trace_folder is None:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(Path(self.trace_folder, f"{process}.json")))
