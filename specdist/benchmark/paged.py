"""The pair in specdist's engine: caches for the largest batch, and an engine for any smaller one."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.benchmark.pair import Pair
from specdist.cache.pages import PageTable
from specdist.engine.draft import DraftModel
from specdist.engine.engine import Engine
from specdist.engine.ledger import Ledger
from specdist.engine.proposals import Proposer
from specdist.engine.proposers import ColocatedDraft, NoDraft
from specdist.engine.scheduler import Scheduler, SchedulerSettings
from specdist.engine.sequence import Request
from specdist.engine.stopping import StopRules
from specdist.engine.targets import LocalTarget
from specdist.job.replica import PAGE_SIZE
from specdist.job.tokens import PromptEncoder
from specdist.models.runner import ModelRunner
from specdist.policies import FixedLength
from specdist.sampling.distributions import SamplingSettings

MAX_BATCH_TOKENS = 2048


class PagedPair:
    """Unlike :class:`specdist.job.replica.Replica` it makes engines of several batch sizes over one pair, so
    that all methods share the weights."""

    def __init__(
        self,
        pair: Pair,
        *,
        max_batch_rows: int,
        max_seq_len: int,
        max_draft_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.pair = pair
        self.max_batch_rows = max_batch_rows
        self._max_seq_len = max_seq_len
        self._settings = SamplingSettings(temperature=temperature)
        self._seed = seed
        self._encoder = PromptEncoder(pair.tokenizer, max_prompt_tokens=max_seq_len - 1)
        # Room for every row's longest text and a block behind it: no row is ever preempted or kept waiting.
        pages_per_row = -(-max_seq_len // PAGE_SIZE) + -(-(max_draft_tokens + 1) // PAGE_SIZE) + 1
        self.num_pages = max_batch_rows * pages_per_row
        pair.use_specdist_attention()
        self.target, self.draft = (ModelRunner(model, pair.device) for model in (pair.target, pair.draft))
        for runner in (self.target, self.draft):
            runner.allocate(
                num_pages=self.num_pages,
                page_size=PAGE_SIZE,
                num_slots=max_batch_rows,
                max_seq_len=pages_per_row * PAGE_SIZE,
            )

    def new_page_table(self, num_slots: int) -> PageTable:
        """An empty one: nothing is left of earlier prompts."""
        return PageTable(num_pages=self.num_pages, page_size=PAGE_SIZE, num_slots=num_slots)

    def engine(
        self, requests: Sequence[Request], *, batch_size: int, num_draft_tokens: int
    ) -> tuple[Engine, Ledger]:
        """A new engine over these requests, and its books; with no draft tokens it runs the target alone."""
        scheduling = SchedulerSettings(
            max_batch_rows=batch_size,
            max_batch_tokens=max(MAX_BATCH_TOKENS, batch_size * (num_draft_tokens + 1)),
            max_draft_tokens=num_draft_tokens,
            max_new_tokens=self._max_seq_len,
            max_seq_len=self._max_seq_len,
            seed=self._seed,
        )
        ledger = Ledger()
        engine = Engine(
            target=LocalTarget(self.target, settings=self._settings, vocab_size=self.pair.vocab_size),
            proposer=self._proposer(batch_size, num_draft_tokens),
            scheduler=Scheduler(scheduling, self.new_page_table(batch_size), iter(requests)),
            stop_rules=StopRules(self._encoder.decode, self.pair.stop_token_ids),
            ledger=ledger,
        )
        return engine, ledger

    def _proposer(self, batch_size: int, num_draft_tokens: int) -> Proposer:
        if not num_draft_tokens:
            return NoDraft(batch_size)
        draft = DraftModel(
            self.draft,
            FixedLength(num_draft_tokens),
            settings=self._settings,
            vocab_size=self.pair.vocab_size,
            stop_token_ids=self.pair.stop_token_ids,
            num_slots=batch_size,
            max_seq_len=self._max_seq_len,
        )
        return ColocatedDraft(draft)
