"""The methods of a comparison: the length policies, with the draft in this process or one of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from specdist.data.stats.regression import NS_PER_S
from specdist.job.costs.measuring import LEAST_BUDGET_S, NOTHING, combined_costs, context_of, measure_target
from specdist.job.costs.pass_times import Budget
from specdist.job.run.workload import Workload
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import Generated, Row, Specdist
from specdist.lab.benchmark.pair import DraftOrder, PagedPair
from specdist.lab.benchmark.peers.engines import PeerEngine
from specdist.lab.benchmark.run import Lineup
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import CostModel
from specdist.policies.payoff import ASSUMED_ACCEPTANCE, plan_asynchronous
from specdist.policies.registry import uses_features
from tests.lab.benchmark.config import (
    ASYNCHRONOUS,
    COLOCATED,
    OVERLAPS,
    SEPARATE,
    SYNCHRONOUS,
    ComparisonConfig,
)
from tests.lab.benchmark.setting import ComparedSetting
from tests.lab.draft_rank import DraftRank, RankOrder, torch_threads


class PlacedSpecdist(Specdist):
    """specdist with the draft in this process, or on a rank of its own; then each has half of the threads."""

    order: RankOrder

    def __init__(self, paged: PagedPair, order: RankOrder, rank: DraftRank | None = None) -> None:
        super().__init__(paged, order)
        self.name += f", {order.name}" if rank else ""
        self._rank = rank

    @property
    def placement(self) -> str:
        return COLOCATED if self._rank is None else ASYNCHRONOUS if self.order.ahead.num_ahead else SEPARATE

    def following(self, order: RankOrder) -> PlacedSpecdist:
        """The same method with another draft."""
        return PlacedSpecdist(self._paged, order, self._rank)

    def prepare(self) -> None:
        super().prepare()
        if self._rank is not None:
            self._rank.build(self.order)

    def generate(self, rows: Sequence[Row]) -> Generated:
        if self._rank is None:
            with self.order.traced("both"):
                return super().generate(rows)
        with (
            torch_threads(self._rank.num_threads),
            self._rank.serving() as channel,
            self.order.traced("target"),
        ):
            return self._run(rows, self._paged.assembly.draft(channel))


class ComparedLineup(Lineup):
    """``rank``: the draft's, for the separate placement."""

    def __init__(
        self,
        config: ComparisonConfig,
        setting: ComparedSetting,
        rank: DraftRank | None,
        peers: Sequence[PeerEngine] = (),
    ) -> None:
        self._rank, self._config = rank, config
        self.compares_engines = config.policies is None
        super().__init__(config, setting, peers)

    def _choices(self, config: BenchmarkConfig) -> list[PolicyChoice]:
        return self._config.choices or super()._choices(config)

    def _drafting(self, orders: Sequence[DraftOrder]) -> Iterator[Specdist]:
        config = self._config
        if config.is_colocated:
            for method in super()._drafting(orders):
                yield PlacedSpecdist(self._paged, RankOrder(**vars(method.order)))
        known: dict[bool, CostModel] = {}
        for order in [RankOrder(**vars(order)) for order in orders if self._rank is not None]:
            assert self._rank is not None
            kind = uses_features(order.choice.policy)
            if kind not in known:
                known[kind] = separate_costs(self._paged, self._rank, order)
                name = f"separate, batch {order.num_slots}" + ", with features" * kind
                self.costs[name] = known[kind].to_json()
            for variant in separate_orders(
                dataclasses.replace(order, costs=known[kind]),
                num_branches=config.num_branches,
                overlaps=config.overlaps or OVERLAPS,
                compares_branches=config.policies is None,
            ):
                yield PlacedSpecdist(self._paged, variant, self._rank)


def separate_costs(paged: PagedPair, rank: DraftRank, order: RankOrder) -> CostModel:
    """Of both sides, one after the other, as the main job measures them: together they would slow each
    other."""
    paged.pair.use_specdist_attention()
    assembly = order.assembly(paged.assembly)
    workload = Workload(num_context_tokens=paged.num_context_tokens)
    with torch_threads(rank.num_threads):
        budget = Budget(LEAST_BUDGET_S * NS_PER_S)
        target = measure_target(assembly, paged.target, None, workload=workload, budget=budget)
    assert target is not None
    draft, context = rank.call("measure", order), context_of(assembly, workload)[0]
    return combined_costs(target, draft, NOTHING, context, order.num_slots)


def separate_orders(
    order: RankOrder,
    *,
    num_branches: int | None,
    overlaps: Sequence[str] = OVERLAPS,
    compares_branches: bool = True,
) -> list[RankOrder]:
    """The synchronous order, and the asynchronous one as the main job would plan it from its costs.

    Args:
        order: of a draft that does nothing ahead.
        num_branches: None lets the costs decide, which may prefer none.
        compares_branches: a plan with branches is preceded by one without any.
    """
    assert order.costs is not None
    orders = [order]
    for count in [0, num_branches] if compares_branches and num_branches != 0 else [num_branches]:
        ahead = plan_asynchronous(
            order.costs,
            num_rows=order.num_slots,
            max_draft_tokens=order.choice.max_draft_tokens,
            num_branches=count,
            acceptance=ASSUMED_ACCEPTANCE,
        )
        if orders[-1].ahead != ahead:
            orders.append(dataclasses.replace(order, ahead=ahead))
    return [item for item in orders if (ASYNCHRONOUS if item.ahead.num_ahead else SYNCHRONOUS) in overlaps]
