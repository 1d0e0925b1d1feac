"""Drafts of a benchmark: what all of them have in common, and which one an engine wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from specdist.engine.device_clock import clock_of
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.proposals import DraftAhead
from specdist.engine.timeline import Kind, Timeline
from specdist.job.allocation import PAGE_SIZE
from specdist.job.costs import BRANCH_COUNTS, draw_from_logits, measure_curve
from specdist.job.policies import build_policy
from specdist.models.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.policies.costs import CostModel, Curve
from specdist.policies.options import PolicyChoice
from specdist.sampling.distributions import SamplingSettings


def fixed_length(num_draft_tokens: int) -> PolicyChoice:
    """Always so many draft tokens; with 0 the target alone."""
    return PolicyChoice.of("fixed", num_draft_tokens=num_draft_tokens) if num_draft_tokens else PolicyChoice()


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


@dataclass(frozen=True, kw_only=True)
class DraftTerms:
    """Sampling, vocabulary and sizes on which the target's side and every draft agree, in any process.

    Attributes:
        num_pages: of the page table, whose pages both models have.
        max_cache_len: tokens of a row that the cache has room for.
        max_seq_len: longest prompt plus completion.
        max_draft_tokens: of one block of any order.
        num_context_tokens: before a pass in the middle of a row.
    """

    settings: SamplingSettings
    vocab_size: int
    stop_token_ids: frozenset[int]
    num_pages: int
    max_cache_len: int
    max_seq_len: int
    max_draft_tokens: int
    num_context_tokens: int

    def allocate(self, runner: ModelRunner, num_slots: int, *, has_branches: bool = False) -> None:
        """Take the cache's memory; with branches, for as many as the costs may ask for."""
        runner.allocate(
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            num_slots=num_slots,
            max_seq_len=self.max_cache_len,
            num_branch_rows=num_slots * BRANCH_COUNTS[-1] if has_branches else 0,
            max_branch_tokens=self.max_draft_tokens + 1,
        )

    def step_times(self, runner: ModelRunner, num_rows: int, *, with_features: bool) -> Curve:
        """Measured: a draft step over its rows, which may be branches."""
        finish = partial(
            draw_from_logits,
            settings=self.settings,
            vocab_size=self.vocab_size,
            uses_features=with_features,
        )
        return measure_curve(
            runner,
            finish,
            num_rows=num_rows,
            num_tokens_per_row=1,
            num_context_tokens=self.num_context_tokens,
        )

    def policy(self, order: DraftOrder) -> LengthPolicy:
        """The order's policy, which has learned nothing yet."""
        return build_policy(order.choice, order.costs, is_coupled=not self.settings.is_random)

    def model(
        self, runner: ModelRunner, order: DraftOrder, clock: Timeline, policy: LengthPolicy | None = None
    ) -> DraftWorker:
        """A draft that has seen no prompt yet, with a new policy of the order's unless one is given."""
        return DraftWorker(
            runner,
            policy or self.policy(order),
            settings=self.settings,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            num_slots=order.num_slots,
            max_seq_len=self.max_seq_len,
            ahead=order.ahead,
            clock=clock,
        )
