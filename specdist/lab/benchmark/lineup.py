"""The methods of a benchmark, and the costs of passes in each placement: measured once, then frozen."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdist.job.costs.costs import draft_curve, target_curve
from specdist.job.costs.host_times import HostTimes, host_times
from specdist.lab.benchmark.config import AHEAD, IN_TURNS, OVERLAPS, BenchmarkConfig
from specdist.lab.benchmark.methods import Method, Specdist, TransformersAssisted, TransformersGenerate
from specdist.lab.benchmark.setting import Setting
from specdist.lab.benchmark.sides.draft_rank import DraftRank, torch_threads
from specdist.lab.benchmark.sides.drafts import DraftOrder, fixed_length, with_slots
from specdist.lab.benchmark.sides.pair import PagedPair
from specdist.lab.benchmark.sides.peers import Vllm, VllmEngine
from specdist.policies.choice import PolicyChoice
from specdist.policies.costs import CostModel, Curve
from specdist.policies.payoff import ASSUMED_ACCEPTANCE, plan_ahead
from specdist.policies.registry import needs_costs, uses_features

logger = logging.getLogger(__name__)


@dataclass
class Lineup:
    """``costs``: by placement and batch size, those that policies and plans use."""

    methods: list[Method] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementCosts:
    """Times of passes by number of rows; ``draft`` by whether a step includes the features; ``host``: of both
    models in this process."""

    target: Curve
    draft: Mapping[bool, Curve]
    host: HostTimes | None = None

    def of(self, order: DraftOrder) -> CostModel:
        """As the main job would have measured them for this order's policy."""
        costs = CostModel(self.target, self.draft[uses_features(order.choice.policy)])
        return costs if self.host is None else self.host.added_to(costs)

    def to_json(self) -> dict[str, Any]:
        curves = {"target": self.target}
        curves |= {"draft_with_features" if kind else "draft": self.draft[kind] for kind in self.draft}
        if self.host is not None:
            curves |= {f"host_{name}": curve for name, curve in self.host._asdict().items()}
        return {name: dataclasses.asdict(curve) for name, curve in curves.items()}


def line_up(
    config: BenchmarkConfig,
    setting: Setting,
    rank: DraftRank | None,
    peers: Mapping[int, VllmEngine] | None = None,
) -> Lineup:
    """The methods of the options, in the order in which they take turns.

    Args:
        peers: engines of vLLM by number of draft tokens, instead of transformers. With them ``goodput`` runs,
            too.
    """
    assert config.batch_sizes
    lineup = Lineup()
    paged, pair, settings, seed = setting.paged, setting.pair, setting.paged.settings, config.seed
    with_transformers = config.policies is None and not peers
    if with_transformers:
        assisted = TransformersAssisted(pair, settings, num_draft_tokens=config.num_draft_tokens, seed=seed)
        lineup.methods.append(assisted)
    for batch_size in config.batch_sizes:
        if with_transformers:
            lineup.methods.append(TransformersGenerate(pair, settings, batch_size=batch_size, seed=seed))
        choices = config.choices or [fixed_length(config.num_draft_tokens)]
        if peers:
            lineup.methods += [Vllm(setting, peers[length], length, batch_size) for length in peers]
            choices.append(PolicyChoice.of("goodput", max_draft_tokens=config.longest_draft))
        alone, *orders = (
            DraftOrder(num_slots=batch_size, choice=choice) for choice in (PolicyChoice(), *choices)
        )
        lineup.methods.append(Specdist(paged, alone))
        if config.is_colocated:
            deciding = [order for order in orders if needs_costs(order.choice.policy)]
            if deciding:
                costs = measure_costs(paged, None, batch_size, _kinds(deciding))
                lineup.costs[f"colocated, batch {batch_size}"] = costs.to_json()
            lineup.methods += [
                Specdist(
                    paged, dataclasses.replace(order, costs=costs.of(order)) if order in deciding else order
                )
                for order in orders
            ]
        if rank is not None:
            costs = measure_costs(paged, rank, batch_size, _kinds(orders))
            lineup.costs[f"separate, batch {batch_size}"] = costs.to_json()
            lineup.methods += [
                Specdist(paged, variant, rank)
                for order in orders
                for variant in separate_orders(
                    order,
                    costs,
                    num_branches=config.num_branches,
                    overlaps=config.overlaps or OVERLAPS,
                    compares_branches=config.policies is None,
                )
            ]
    return lineup


def _kinds(orders: Sequence[DraftOrder]) -> set[bool]:
    """Whether draft steps are to be timed with features, without, or both."""
    return {uses_features(order.choice.policy) for order in orders}


def measure_costs(
    paged: PagedPair, rank: DraftRank | None, num_rows: int, kinds: Collection[bool]
) -> PlacementCosts:
    """Both sides, one after the other, as the main job does: together they would slow each other.

    Args:
        rank: the draft's; None for both models in this process.
        kinds: draft steps with features, without, or both.
    """
    paged.pair.use_specdist_attention()
    assembly, settings = paged.assembly, paged.settings
    sizes = {"num_rows": num_rows, "num_context_tokens": paged.num_context_tokens}
    with contextlib.nullcontext() if rank is None else torch_threads(rank.num_threads):
        per_row = assembly.scheduling.max_draft_tokens + 1
        target = target_curve(
            paged.target, settings, assembly.vocab_size, num_tokens_per_row=per_row, **sizes
        )

    def draft(uses_features: bool) -> Curve:
        if rank is not None:
            return rank.measure(num_rows, uses_features=uses_features)
        return draft_curve(
            paged.draft,
            settings,
            assembly.vocab_size,
            uses_features=uses_features,
            num_tokens_per_row=1,
            **sizes,
        )

    costs = PlacementCosts(target, {kind: draft(kind) for kind in kinds})
    if rank is None:
        passes = CostModel(costs.target, costs.draft[max(kinds)])
        host = host_times(with_slots(assembly, num_rows), paged.target, paged.draft, passes, num_rows)
        costs = dataclasses.replace(costs, host=host)
    logger.info(
        "%s, batch %d: a target pass of one token per row takes %.2f ms, a draft step %.2f ms",
        "colocated" if rank is None else "separate",
        num_rows,
        float(target(num_rows)) / 1e6,
        float(next(iter(costs.draft.values()))(num_rows)) / 1e6,
    )
    return costs


def separate_orders(
    order: DraftOrder,
    costs: PlacementCosts,
    *,
    num_branches: int | None,
    overlaps: Sequence[str] = OVERLAPS,
    compares_branches: bool = True,
) -> list[DraftOrder]:
    """The order in turns, and ahead as the main job would plan it from these costs.

    Args:
        order: of a draft that does nothing ahead.
        num_branches: None lets the costs decide, which may prefer none.
        compares_branches: a plan with branches is preceded by one without any.
    """
    known = costs.of(order)
    orders = [dataclasses.replace(order, costs=known)]
    for count in [0, num_branches] if compares_branches and num_branches != 0 else [num_branches]:
        ahead = plan_ahead(
            known,
            num_rows=order.num_slots,
            max_draft_tokens=order.choice.max_draft_tokens,
            num_branches=count,
            acceptance=ASSUMED_ACCEPTANCE,
        )
        if orders[-1].ahead != ahead:
            orders.append(dataclasses.replace(orders[0], ahead=ahead))
    return [item for item in orders if (AHEAD if item.ahead.num_ahead else IN_TURNS) in overlaps]
