"""Drafts of a benchmark: what all of them have in common, and which one an engine wants."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdist.engine.draft import DraftModel
from specdist.engine.proposals import DraftAhead
from specdist.engine.timeline import Timeline
from specdist.job.costs import BRANCH_COUNTS
from specdist.job.replica import PAGE_SIZE
from specdist.models.runner import ModelRunner
from specdist.policies import FixedLength
from specdist.sampling.distributions import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class DraftOrder:
    """The draft of one engine. ``keeps_spans``: for a picture of its time."""

    num_slots: int
    num_draft_tokens: int
    ahead: DraftAhead = field(default_factory=DraftAhead)
    keeps_spans: bool = False

    @property
    def name(self) -> str:
        """How the draft works in a process of its own."""
        count = self.ahead.num_branches
        ahead = "ahead" if self.ahead.num_tokens else "separate"
        return ahead + (f", {count} branch{'es' * (count > 1)}" if count else "")


@dataclass(frozen=True, kw_only=True)
class DraftTerms:
    """Sampling, vocabulary and sizes on which the target's side and every draft agree, in any process.

    Attributes:
        num_pages: of the page table, whose pages both models have.
        max_cache_len: tokens of a row that the cache has room for.
        max_seq_len: longest prompt plus completion.
    """

    settings: SamplingSettings
    vocab_size: int
    stop_token_ids: frozenset[int]
    num_pages: int
    max_cache_len: int
    max_seq_len: int
    max_draft_tokens: int

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

    def model(self, runner: ModelRunner, order: DraftOrder, clock: Timeline) -> DraftModel:
        """A draft that has seen no prompt yet."""
        return DraftModel(
            runner,
            FixedLength(order.num_draft_tokens),
            settings=self.settings,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            num_slots=order.num_slots,
            max_seq_len=self.max_seq_len,
            ahead=order.ahead,
            clock=clock,
        )
