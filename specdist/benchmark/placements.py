"""specdist's ways to generate: both models in this process, or the draft on a rank of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specdist.benchmark.draft_rank import DraftRank
from specdist.benchmark.drafts import DraftOrder
from specdist.benchmark.methods import Generated
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.timing import torch_threads
from specdist.benchmark.workload import Row
from specdist.costs import CostModel
from specdist.engine.proposals import Proposer
from specdist.engine.sequence import Request
from specdist.engine.timeline import Timeline
from specdist.job.costs import judge_logits, measure_curve, plan_ahead
from specdist.stats import Stats

logger = logging.getLogger(__name__)


class SpecdistColocated:
    """specdist's engine with both models in this process; without draft tokens it is the target alone."""

    def __init__(self, paged: PagedPair, order: DraftOrder) -> None:
        self.name = (
            f"specdist, K = {order.num_draft_tokens}" if order.num_draft_tokens else "specdist, target only"
        )
        self.batch_size = order.num_slots
        self.order = order
        self._paged = paged

    def prepare(self) -> None:
        self._paged.pair.use_specdist_attention()

    def generate(self, rows: Sequence[Row]) -> Generated:
        clock = Timeline("host", keeps_spans=self.order.keeps_spans)
        draft_clock = Timeline("idle", keeps_spans=self.order.keeps_spans)
        proposer = self._paged.proposer(self.order, draft_clock)
        completions, stats = _run(self._paged, self.order, rows, proposer, clock)
        return Generated(completions, stats, clock.spans, draft_clock.spans)


class SpecdistSeparate:
    """specdist's engine in this process, the draft on a rank of its own; each has half of the threads."""

    def __init__(self, paged: PagedPair, rank: DraftRank, order: DraftOrder) -> None:
        self.name = f"specdist, K = {order.num_draft_tokens}, {order.name}"
        self.batch_size = order.num_slots
        self.order = order
        self._paged = paged
        self._rank = rank

    def prepare(self) -> None:
        self._paged.pair.use_specdist_attention()
        self._rank.build(self.order)

    def generate(self, rows: Sequence[Row]) -> Generated:
        clock = Timeline("host", keeps_spans=self.order.keeps_spans)
        with torch_threads(self._rank.num_threads), self._rank.serving() as proposer:
            completions, stats = _run(self._paged, self.order, rows, proposer, clock)
        return Generated(completions, stats, clock.spans, self._rank.spans())


def _run(
    paged: PagedPair, order: DraftOrder, rows: Sequence[Row], proposer: Proposer, clock: Timeline
) -> tuple[list[list[int]], Stats]:
    """Token ids in the order of the rows, and the books."""
    requests = [
        Request(row_id=index, sample_index=0, prompt_ids=row.prompt_ids, max_new_tokens=row.max_new_tokens)
        for index, row in enumerate(rows)
    ]
    engine, ledger = paged.engine(requests, order, proposer, clock)
    finished = {completion.request.row_id: completion.token_ids for completion in engine.run()}
    return [finished[index] for index in range(len(rows))], ledger.close_shard(0)


@dataclass(frozen=True, kw_only=True)
class SeparatePlan:
    """The orders of a batch size: in turns, ahead, and ahead with branches if there are to be some; and the
    measured costs that they follow from."""

    orders: list[DraftOrder]
    costs: CostModel


def plan_separate(
    paged: PagedPair, rank: DraftRank, order: DraftOrder, num_branches: int | None
) -> SeparatePlan:
    """Measure both sides, one after the other, and plan as the main job does.

    Args:
        order: batch size and draft tokens; it does nothing ahead.
        num_branches: None leaves them to the costs, which may ask for none.
    """
    paged.pair.use_specdist_attention()
    num_rows, num_draft_tokens = order.num_slots, order.num_draft_tokens
    with torch_threads(rank.num_threads):
        target = measure_curve(
            paged.target,
            partial(judge_logits, settings=paged.terms.settings, vocab_size=paged.terms.vocab_size),
            num_rows=num_rows,
            num_tokens_per_row=num_draft_tokens + 1,
        )
    rank.start_measuring(num_rows)
    costs = CostModel(target, rank.measured())
    chain, branched = (
        plan_ahead(costs, num_rows=num_rows, max_draft_tokens=num_draft_tokens, num_branches=count)
        for count in (0, num_branches)
    )
    orders = [order, dataclasses.replace(order, ahead=chain)]
    if branched.num_branches:
        orders.append(dataclasses.replace(order, ahead=branched))
    logger.info(
        "batch %d: a target pass takes %.2f ms, a draft step %.2f ms; %d tokens ahead, or %d and %d branches",
        num_rows,
        float(costs.target(num_rows * (num_draft_tokens + 1))) / 1e6,
        float(costs.draft(num_rows)) / 1e6,
        chain.num_tokens,
        branched.num_tokens,
        branched.num_branches,
    )
    return SeparatePlan(orders=orders, costs=costs)
