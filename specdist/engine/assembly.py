"""Puts runners, cache, scheduler, draft and engine together; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed import ProcessGroup

from specdist.engine.draft.client import Channel, Draft, InProcess, serve_draft
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.ngram_draft import NgramDraft
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.engine.messages.target_states import LastStates
from specdist.engine.request import Requests
from specdist.engine.rounds.logprobs import LogprobBook
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.target.local_target import LocalTarget
from specdist.engine.target.pipeline import LogitsPipeline
from specdist.engine.target.sharded_target import (
    RANK_ZERO,
    Collectives,
    ShardedTarget,
    VocabParallelVerifier,
    target_worker_loop,
)
from specdist.engine.times.timeline import Timeline, clock_of
from specdist.models.cache.pages import PageTable
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.drafters.runner import DrafterRunner
from specdist.models.passes.runner import ModelRunner
from specdist.policies import LengthPolicy
from specdist.policies.costs import CostModel
from specdist.policies.payoff import ALONE, LEAST_SHARE, RoundChooser, RoundShape
from specdist.sampling.distributions import SamplingSettings
from specdist.sampling.processing.processors import TokenMasker
from specdist.sampling.vocab_parallel import vocab_ranges

# Default number of tokens per page of the cache.
PAGE_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Settings that target and draft share, wherever each of them runs.

    Attributes:
        vocab_size: ids that can be drawn; logits may be wider by padding.
        scheduling: limits of the batch; its number of slots is also that of the caches.
        num_pages: of the page table that both models' caches follow.
        windowed: layers of the target that have pages of their own.
        max_cache_len: tokens of one sequence that the page table has room for; by default ``max_seq_len``.
        ahead: what the draft does while the target verifies; with a ``chooser``, which chooses what each
            round does, the most that it may do.
        trusts_draft: lossy, see :class:`specdist.engine.engine.Engine`.
        masker: makes what says which tokens are allowed, for each side one of its own.
    """

    settings: SamplingSettings
    vocab_size: int
    stop_rules: StopRules
    scheduling: SchedulerSettings
    num_pages: int
    page_size: int = PAGE_SIZE
    windowed: WindowedLayers | None = None
    max_cache_len: int | None = None
    ahead: RoundShape = ALONE
    chooser: RoundChooser | None = None
    is_traced: bool = False
    trusts_draft: bool = False
    masker: Callable[[], TokenMasker] | None = None

    def allocate(self, runner: ModelRunner) -> None:
        """Allocate the target's cache, once."""
        num_slots = self.scheduling.num_slots
        self._allocate(
            runner,
            num_slots=num_slots,
            num_pages=self.num_pages,
            windowed=self.windowed,
            rollback=self.scheduling.target_rollback,
            num_prefix_states=self.scheduling.num_prefix_states,
        )

    def allocate_draft(
        self, runner: ModelRunner, num_branch_slots: int = 0, max_branch_tokens: int = 0
    ) -> None:
        """Allocate a draft's cache, once: its pages and those of branches."""
        self._allocate(
            runner,
            num_slots=self.scheduling.num_slots,
            num_pages=self.num_pages,
            num_branch_slots=num_branch_slots,
            max_branch_tokens=max_branch_tokens,
            rollback=self.scheduling.draft_rollback,
        )

    def _allocate(self, runner: ModelRunner, **sizes: Any) -> None:
        longest = self.max_cache_len or self.scheduling.max_seq_len
        runner.allocate(page_size=self.page_size, max_seq_len=longest, **sizes)

    def page_table(self) -> PageTable:
        """An empty page table."""
        return PageTable(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_slots=self.scheduling.num_slots,
            rope_borders=self.scheduling.rope_borders,
            windowed=self.windowed,
            num_prefix_states=self.scheduling.num_prefix_states if self.scheduling.target_keeps_states else 0,
        )

    def local_target(self, runner: ModelRunner) -> LocalTarget:
        """The whole target in this process."""
        return LocalTarget(
            runner,
            settings=self.settings,
            vocab_size=self.vocab_size,
            pipeline=self.target_pipeline(runner),
        )

    def sharded_target(self, runner: ModelRunner, group: ProcessGroup) -> ShardedTarget:
        """Rank 0 of a target on several ranks; the others are in :meth:`serve_target`."""
        return ShardedTarget(runner, group, self._verifier(runner, group))

    def serve_target(self, runner: ModelRunner, group: ProcessGroup) -> None:
        """Run the passes that rank 0 announces, until it closes."""
        target_worker_loop(runner, group, self._verifier(runner, group))

    def _verifier(self, runner: ModelRunner, group: ProcessGroup) -> VocabParallelVerifier:
        collectives = Collectives(group)
        ids = vocab_ranges(self.vocab_size, collectives.size)[collectives.rank]
        return VocabParallelVerifier(
            collectives,
            settings=self.settings,
            vocab_size=self.vocab_size,
            pipeline=self.target_pipeline(runner, ids, collectives.rank == RANK_ZERO),
        )

    def target_pipeline(
        self, runner: ModelRunner, ids: range | None = None, is_rank0: bool = True
    ) -> LogitsPipeline | None:
        """The processing of logits on a rank of the target, which has these ``ids``; None without any."""
        if self.settings.processing is None:
            return None
        num_slots = self.scheduling.num_slots
        most_tokens = self.scheduling.max_seq_len + self.scheduling.max_draft_tokens + 2
        return LogitsPipeline(
            self.settings,
            np.zeros((num_slots, most_tokens), np.int64),
            num_slots=num_slots,
            vocab_size=self.vocab_size,
            device=runner.device,
            ids=ids,
            masker=self.masker() if self.masker is not None and is_rank0 else None,
        )

    def draft_worker(
        self,
        runner: ModelRunner,
        policy: LengthPolicy,
        clock: Timeline | None = None,
        *,
        ahead: RoundShape | None = None,
        may_be_skipped: bool = False,
    ) -> DraftWorker:
        """A draft without sequences. ``ahead``: the same in every round, instead of the assembly's.
        ``may_be_skipped``: it need not be asked in rounds that are faster without it."""
        is_lazy = may_be_skipped and self._may_skip(policy) and not isinstance(runner, DrafterRunner)
        return DraftWorker(
            runner,
            policy,
            settings=self.settings,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_rules.token_ids,
            scheduling=self.scheduling,
            ahead=self.ahead if ahead is None else ahead,
            chooser=self.chooser if ahead is None else None,
            is_traced=self.is_traced,
            clock=clock,
            masker=None if self.masker is None else self.masker(),
            lazy_pages=(self.num_pages, self.page_size) if is_lazy else None,
        )

    def serve_draft(self, runner: ModelRunner, policy: LengthPolicy, ahead: RoundShape | None = None) -> None:
        """Serve rank 0's requests on a rank of its own, until it closes. ``ahead``: see
        :meth:`draft_worker`."""
        clock = Timeline("transfer", clock=clock_of(runner.device))
        serve_draft(self.draft_worker(runner, policy, clock, ahead=ahead), RANK_ZERO, clock=clock)

    def local_draft(
        self,
        runner: ModelRunner | None,
        policy: LengthPolicy,
        clock: Timeline | None = None,
        target: ModelRunner | None = None,
    ) -> Draft:
        """The draft in the target's process; without a runner, target-only generation. ``target``: see
        :meth:`draft`."""
        if runner is None or not policy.max_draft_tokens:
            return Draft()
        worker = self.draft_worker(runner, policy, clock, may_be_skipped=True)
        least_share = LEAST_SHARE if worker.is_lazy else 0.0
        return self.draft(InProcess(worker), target, least_share)

    def draft(self, channel: Channel, target: ModelRunner | None = None, least_share: float = 0.0) -> Draft:
        """The draft at the other end. ``target``: whose states it may read. ``least_share``: as of
        :class:`Draft`."""
        reader = None if target is None else target.reader
        return Draft(
            channel,
            max_missed_tokens=self.scheduling.max_num_batched_tokens // 2,
            least_share=least_share,
            states=None if reader is None else LastStates(reader),
        )

    def _may_skip(self, policy: LengthPolicy) -> bool:
        """Whether a draft whose model is not used in some rounds does nothing less than it should: tokens
        that a constraint forces are worth their verification in any round."""
        return self.masker is None and not self.ahead.num_ahead and policy.is_for_batch

    def ngram_draft(self, costs: CostModel | None = None) -> NgramDraft:
        """N-gram lookup, in the process that verifies the candidates; ``costs`` as of :class:`NgramDraft`."""
        return NgramDraft(
            settings=self.settings,
            vocab_size=self.vocab_size,
            num_slots=self.scheduling.num_slots,
            max_draft_tokens=self.scheduling.max_draft_tokens,
            max_seq_len=self.scheduling.max_seq_len,
            costs=costs,
            stop_token_ids=self.stop_rules.token_ids,
            is_traced=self.is_traced,
            masker=None if self.masker is None else self.masker(),
        )

    def engine(
        self,
        requests: Requests,
        *,
        target: Target,
        proposer: Proposer,
        stats_recorder: StatsRecorder,
        clock: Timeline | None = None,
        pages: PageTable | None = None,
        on_lone_row: Callable[[tuple[int, int] | None], None] | None = None,
    ) -> Engine:
        """An engine over these requests.

        Args:
            pages: an empty page table, by default a new one.
            on_lone_row: see :class:`Engine`.
        """
        scheduler = Scheduler(
            self.scheduling,
            pages or self.page_table(),
            requests,
            scores_prompts=self.settings.num_prompt_logprobs is not None,
        )
        return Engine(
            target=target,
            proposer=proposer,
            scheduler=scheduler,
            stop_rules=self.stop_rules,
            stats_recorder=stats_recorder,
            trusts_draft=self.trusts_draft,
            clock=clock,
            processing=self.settings.processing,
            book=LogprobBook(self.settings) if self.settings.wants_logprobs else None,
            on_lone_row=on_lone_row,
            masker=None if self.masker is None else self.masker(),
        )
