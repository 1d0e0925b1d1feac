"""Which methods a benchmark measures: specdist beside transformers, or its length policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.draft_rank import DraftRank
from specdist.benchmark.drafts import DraftOrder, fixed_length
from specdist.benchmark.methods import Method, TransformersAssisted, TransformersGenerate
from specdist.benchmark.placements import SpecdistColocated, SpecdistSeparate
from specdist.benchmark.plans import PlacementCosts, measure_colocated, measure_separate, separate_orders
from specdist.benchmark.setting import Setting
from specdist.job.policies import uses_features
from specdist.policy_options import PolicyChoice, needs_costs


@dataclass
class Lineup:
    """``costs``: by placement and batch size, what was measured to decide by."""

    methods: list[Method] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)


def line_up(config: BenchmarkConfig, setting: Setting, rank: DraftRank | None) -> Lineup:
    """The methods of the options, in the order in which they are to take turns."""
    assert config.batch_sizes
    lineup = Lineup()
    temperature, seed = config.temperature, config.seed
    if config.policies is None:
        length = config.num_draft_tokens
        lineup.methods.append(
            TransformersAssisted(setting.pair, num_draft_tokens=length, temperature=temperature, seed=seed)
        )
    for batch_size in config.batch_sizes:
        if config.policies is None:
            lineup.methods.append(
                TransformersGenerate(setting.pair, batch_size=batch_size, temperature=temperature, seed=seed)
            )
        alone = DraftOrder(num_slots=batch_size, choice=PolicyChoice())
        lineup.methods.append(SpecdistColocated(setting.paged, alone))
        orders = [
            DraftOrder(num_slots=batch_size, choice=choice)
            for choice in config.choices or [fixed_length(config.num_draft_tokens)]
        ]
        if config.is_colocated:
            _add_colocated(lineup, setting, orders)
        if rank is not None:
            _add_separate(lineup, config, setting, rank, orders)
    return lineup


def _add_colocated(lineup: Lineup, setting: Setting, orders: Sequence[DraftOrder]) -> None:
    led = [order for order in orders if needs_costs(order.choice.policy)]
    costs: PlacementCosts | None = None
    if led:
        costs = measure_colocated(setting.paged, led[0].num_slots, _kinds(led))
        lineup.costs[f"colocated, batch {led[0].num_slots}"] = costs.to_json()
    for order in orders:
        known = costs.of(order) if costs is not None and order in led else None
        lineup.methods.append(SpecdistColocated(setting.paged, replace(order, costs=known)))


def _add_separate(
    lineup: Lineup, config: BenchmarkConfig, setting: Setting, rank: DraftRank, orders: Sequence[DraftOrder]
) -> None:
    assert config.overlaps
    num_rows = orders[0].num_slots
    costs = measure_separate(setting.paged, rank, num_rows, _kinds(orders))
    lineup.costs[f"separate, batch {num_rows}"] = costs.to_json()
    ways = [
        separate_orders(
            order,
            costs,
            num_branches=config.num_branches,
            overlaps=config.overlaps,
            compares_branches=config.policies is None,
        )
        for order in orders
    ]
    lineup.methods += [SpecdistSeparate(setting.paged, rank, order) for found in ways for order in found]


def _kinds(orders: Sequence[DraftOrder]) -> set[bool]:
    """Whether draft steps are to be timed with features, without, or both."""
    return {uses_features(order.choice.policy) for order in orders}
