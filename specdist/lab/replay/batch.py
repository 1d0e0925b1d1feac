"""The batches of a replay: the engine's own scheduler, over the trace's prompts."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.engine.request import Request
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.scheduler import Scheduler
from specdist.lab.replay.trace import ExhaustiveTrace
from specdist.models.cache.pages import PageTable


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Limits of the batch, as in :class:`specdist.engine.schedule.scheduler.SchedulerSettings`; there are
    always enough pages.

    ``page_size`` decides which prefixes of prompts are shared, and so how many tokens a sequence adds to the
    pass in which it is admitted.
    """

    max_num_seqs: int = 1
    max_num_batched_tokens: int = 2048
    page_size: int = 16


def make_scheduler(trace: ExhaustiveTrace, settings: ReplaySettings, max_draft_tokens: int) -> Scheduler:
    """A scheduler with all of the trace's prompts waiting, in order; ``row_id`` numbers them.

    As in the engine, fewer sequences run if ``max_num_batched_tokens`` does not hold a block of
    each.
    """
    requests = [
        Request(
            row_id=row,
            sample_index=0,
            prompt_ids=prompt.prompt_ids.tolist(),
            max_new_tokens=prompt.max_new_tokens,
        )
        for row, prompt in enumerate(trace.prompts)
    ]
    longest = max(len(prompt.prompt_ids) + prompt.max_new_tokens for prompt in trace.prompts)
    scheduling = SchedulerSettings(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_draft_tokens=max_draft_tokens,
        max_new_tokens=longest,
        max_seq_len=longest,
        seed=0,
    )
    # Each sequence's greatest length, its reserved block, and partly used pages at either end.
    pages_per_sequence = (
        sum(-(-length // settings.page_size) + 1 for length in (longest, max_draft_tokens + 1)) + 1
    )
    pages = PageTable(
        num_pages=scheduling.num_slots * pages_per_sequence,
        page_size=settings.page_size,
        num_slots=scheduling.num_slots,
    )
    return Scheduler(scheduling, pages, iter(requests))
