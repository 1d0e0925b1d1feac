"""The pair in specdist's engine: caches for the largest batch, and an engine for any smaller one."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.benchmark.drafts import DraftOrder, DraftTerms
from specdist.benchmark.pair import Pair
from specdist.cache.pages import PageTable
from specdist.engine.engine import Engine
from specdist.engine.proposals import Proposer
from specdist.engine.proposers import ColocatedDraft, NoDraft
from specdist.engine.scheduler import Scheduler, SchedulerSettings
from specdist.engine.sequence import Request
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.stopping import StopRules
from specdist.engine.targets import LocalTarget
from specdist.job.allocation import PAGE_SIZE
from specdist.job.tokens import PromptEncoder
from specdist.models.hidden import HiddenStateHead
from specdist.models.runner import ModelRunner
from specdist.policies import LengthPolicy, reads_head
from specdist.sampling.distributions import SamplingSettings

MAX_NUM_BATCHED_TOKENS = 2048


class PagedPair:
    """Unlike :class:`specdist.job.replica.Replica` it makes engines of several batch sizes over one pair, so
    that all methods share the weights."""

    def __init__(
        self,
        pair: Pair,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        max_draft_tokens: int,
        settings: SamplingSettings,
        seed: int,
        num_context_tokens: int = 0,
        head: HiddenStateHead | None = None,
    ) -> None:
        """``num_context_tokens``: before a pass in the middle of a row, for the times of passes.
        ``head``: for the policies that read one; the others run the draft without it.
        """
        self.pair = pair
        self.max_num_seqs = max_num_seqs
        self._seed = seed
        self._encoder = PromptEncoder(pair.tokenizer, max_prompt_tokens=max_seq_len - 1)
        # Room for every row's longest text, and a block and the tokens ahead after it: no row is ever
        # preempted or kept waiting.
        pages_per_row = -(-max_seq_len // PAGE_SIZE) + -(-2 * (max_draft_tokens + 1) // PAGE_SIZE) + 1
        self.terms = DraftTerms(
            settings=settings,
            vocab_size=pair.vocab_size,
            stop_token_ids=frozenset(pair.stop_token_ids),
            num_pages=max_num_seqs * pages_per_row,
            max_cache_len=pages_per_row * PAGE_SIZE,
            max_seq_len=max_seq_len,
            max_draft_tokens=max_draft_tokens,
            num_context_tokens=num_context_tokens,
        )
        pair.use_specdist_attention()
        self.target, self.draft = (ModelRunner(model, pair.device) for model in (pair.target, pair.draft))
        self.head = head
        self.headed = None if head is None else ModelRunner(pair.draft, pair.device, head=head)
        for runner in (self.target, self.draft, self.headed):
            if runner is not None:
                self.terms.allocate(runner, max_num_seqs)

    def new_page_table(self, num_slots: int) -> PageTable:
        """An empty one: nothing is left of earlier prompts."""
        return PageTable(num_pages=self.terms.num_pages, page_size=PAGE_SIZE, num_slots=num_slots)

    def engine(
        self, requests: Sequence[Request], order: DraftOrder, proposer: Proposer
    ) -> tuple[Engine, StatsRecorder]:
        """A new engine over these requests for a proposer that follows the order, and its books."""
        scheduling = SchedulerSettings(
            max_num_seqs=order.num_slots,
            max_num_batched_tokens=max(
                MAX_NUM_BATCHED_TOKENS, order.num_slots * (order.max_draft_tokens + 1)
            ),
            max_draft_tokens=order.max_draft_tokens,
            num_ahead_tokens=order.ahead.num_tokens,
            max_new_tokens=self.terms.max_seq_len,
            max_seq_len=self.terms.max_seq_len,
            seed=self._seed,
        )
        stats_recorder = StatsRecorder()
        engine = Engine(
            target=LocalTarget(self.target, settings=self.terms.settings, vocab_size=self.terms.vocab_size),
            proposer=proposer,
            scheduler=Scheduler(scheduling, self.new_page_table(order.num_slots), iter(requests)),
            stop_rules=StopRules(self._encoder.decode, self.terms.stop_token_ids),
            stats_recorder=stats_recorder,
            clock=order.timeline("host", self.pair.device),
        )
        return engine, stats_recorder

    def proposer(self, order: DraftOrder, policy: LengthPolicy | None = None) -> Proposer:
        """The draft in this process, or none if there is nothing to draft.

        Args:
            policy: instead of a new one of the order's, of the same longest block.
        """
        if not order.max_draft_tokens:
            return NoDraft(order.num_slots)
        policy = policy or self.terms.policy(order)
        runner = self.headed if reads_head(policy) else self.draft
        assert runner is not None, "the policy reads a head"
        return ColocatedDraft(
            self.terms.model(runner, order, order.timeline("idle", self.pair.device), policy)
        )
