"""The pair in specdist's engine: caches for the largest batch, and an engine for any smaller one."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.benchmark.drafts import DraftOrder
from specdist.benchmark.pair import Pair
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.engine import Engine
from specdist.engine.proposals import Proposer
from specdist.engine.scheduler import SchedulerSettings
from specdist.engine.sequence import Request
from specdist.engine.stats_recorder import StatsRecorder
from specdist.engine.stopping import StopRules
from specdist.job.tokens import PromptEncoder
from specdist.models.hidden import HiddenStateHead
from specdist.models.runner import ModelRunner
from specdist.policies import LengthPolicy, reads_head
from specdist.sampling.distributions import SamplingSettings

MAX_NUM_BATCHED_TOKENS = 2048


class PagedPair:
    """Unlike :class:`specdist.job.replica.Replica` it makes engines of several batch sizes over one pair, so
    that all methods share the weights; and takes only the memory that they need."""

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
        self.num_context_tokens = num_context_tokens
        # Room for every row's longest text, and a block and the tokens ahead after it: no row is ever
        # preempted or kept waiting.
        pages_per_row = -(-max_seq_len // PAGE_SIZE) + -(-2 * (max_draft_tokens + 1) // PAGE_SIZE) + 1
        encoder = PromptEncoder(pair.tokenizer, max_prompt_tokens=max_seq_len - 1)
        self.assembly = Assembly(
            settings=settings,
            vocab_size=pair.vocab_size,
            stop_rules=StopRules(encoder.decode, frozenset(pair.stop_token_ids)),
            scheduling=SchedulerSettings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, max_num_seqs * (max_draft_tokens + 1)),
                max_draft_tokens=max_draft_tokens,
                max_new_tokens=max_seq_len,
                max_seq_len=max_seq_len,
                seed=seed,
            ),
            num_pages=max_num_seqs * pages_per_row,
            max_cache_len=pages_per_row * PAGE_SIZE,
        )
        pair.use_specdist_attention()
        self.target, self.draft = (ModelRunner(model, pair.device) for model in (pair.target, pair.draft))
        self.head = head
        self.headed = None if head is None else ModelRunner(pair.draft, pair.device, head=head)
        for runner in (self.target, self.draft, self.headed):
            if runner is not None:
                self.assembly.allocate(runner)

    @property
    def settings(self) -> SamplingSettings:
        return self.assembly.settings

    def engine(
        self, requests: Sequence[Request], order: DraftOrder, proposer: Proposer
    ) -> tuple[Engine, StatsRecorder]:
        """A new engine over these requests for a proposer that follows the order, and its statistics."""
        stats_recorder = StatsRecorder()
        assembly = order.assembly(self.assembly)
        engine = assembly.engine(
            iter(requests),
            target=assembly.local_target(self.target),
            proposer=proposer,
            stats_recorder=stats_recorder,
            clock=order.timeline("host", self.pair.device),
        )
        return engine, stats_recorder

    def local_draft(self, order: DraftOrder, policy: LengthPolicy | None = None) -> Proposer:
        """The draft in this process.

        Args:
            policy: instead of a new one of the order's, of the same longest block.
        """
        policy = policy or order.policy(self.settings)
        runner = self.headed if reads_head(policy) else self.draft
        assert runner is not None, "the policy reads a head"
        clock = order.timeline("idle", self.pair.device)
        return order.assembly(self.assembly).local_draft(runner, policy, clock)
