"""specdist's ways to generate: both models in this process, or the draft on a rank of its own."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.benchmark.config import AHEAD, COLOCATED, SEPARATE
from specdist.benchmark.draft_rank import DraftRank, torch_threads
from specdist.benchmark.drafts import DraftOrder
from specdist.benchmark.methods import Generated
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.workload import Row
from specdist.engine.device_clock import clock_of
from specdist.engine.proposals import Proposer
from specdist.engine.sequence import Request
from specdist.engine.timeline import Kind, Timeline
from specdist.policies import LengthPolicy
from specdist.stats import Stats


class SpecdistColocated:
    """specdist's engine with both models in this process; without draft tokens it is the target alone."""

    placement = COLOCATED

    def __init__(self, paged: PagedPair, order: DraftOrder) -> None:
        self.name = f"specdist, {order.choice.label}"
        self.batch_size = order.num_slots
        self.order = order
        self._paged = paged

    def prepare(self) -> None:
        self._paged.pair.use_specdist_attention()

    def generate(self, rows: Sequence[Row], policy: LengthPolicy | None = None) -> Generated:
        """``policy``: instead of a new one of the order's."""
        clock, draft_clock = (
            _timeline(self._paged, "host", self.order),
            _timeline(self._paged, "idle", self.order),
        )
        proposer = self._paged.proposer(self.order, draft_clock, policy)
        completions, stats = _run(self._paged, self.order, rows, proposer, clock)
        return Generated(completions, stats, clock.spans, draft_clock.spans)


class SpecdistSeparate:
    """specdist's engine in this process, the draft on a rank of its own; each has half of the threads."""

    def __init__(self, paged: PagedPair, rank: DraftRank, order: DraftOrder) -> None:
        self.name = f"specdist, {order.choice.label}, {order.name}"
        self.batch_size = order.num_slots
        self.order = order
        self.placement = AHEAD if order.ahead.num_tokens else SEPARATE
        self._paged = paged
        self._rank = rank

    def prepare(self) -> None:
        self._paged.pair.use_specdist_attention()
        self._rank.build(self.order)

    def generate(self, rows: Sequence[Row]) -> Generated:
        clock = _timeline(self._paged, "host", self.order)
        with torch_threads(self._rank.num_threads), self._rank.serving() as proposer:
            completions, stats = _run(self._paged, self.order, rows, proposer, clock)
        return Generated(completions, stats, clock.spans, self._rank.spans())


def _timeline(paged: PagedPair, rest: Kind, order: DraftOrder) -> Timeline:
    return Timeline(rest, clock=clock_of(paged.pair.device), keeps_spans=order.keeps_spans)


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
