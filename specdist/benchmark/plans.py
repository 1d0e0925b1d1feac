"""Which drafts are measured in a placement, from what passes cost there: measured once, and then frozen."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdist.benchmark.config import AHEAD, IN_TURNS, OVERLAPS
from specdist.benchmark.draft_rank import DraftRank, torch_threads
from specdist.benchmark.drafts import DraftOrder
from specdist.benchmark.paged import PagedPair
from specdist.costs import CostModel, Curve
from specdist.job.costs import judge_logits, measure_curve, plan_ahead
from specdist.job.policies import uses_features

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacementCosts:
    """What passes of up to so many rows take; ``draft`` by whether a step works out the features too."""

    target: Curve
    draft: Mapping[bool, Curve]

    def of(self, order: DraftOrder) -> CostModel:
        """As the main job would have measured them for this order's policy."""
        return CostModel(self.target, self.draft[uses_features(order.choice.policy)])

    def to_json(self) -> dict[str, Any]:
        curves = {"target": self.target}
        curves |= {"draft_with_features" if kind else "draft": self.draft[kind] for kind in self.draft}
        return {name: dataclasses.asdict(curve) for name, curve in curves.items()}


def measure_colocated(paged: PagedPair, num_rows: int, kinds: Collection[bool]) -> PlacementCosts:
    """Both models in this process. ``kinds``: draft steps with features, without, or both."""
    paged.pair.use_specdist_attention()
    target = _target_curve(paged, num_rows)
    draft = {kind: paged.terms.step_times(paged.draft, num_rows, with_features=kind) for kind in kinds}
    return _logged("colocated", num_rows, PlacementCosts(target, draft))


def measure_separate(
    paged: PagedPair, rank: DraftRank, num_rows: int, kinds: Collection[bool]
) -> PlacementCosts:
    """Both sides, one after the other, as the main job does: at the same time they would slow each other."""
    paged.pair.use_specdist_attention()
    with torch_threads(rank.num_threads):
        target = _target_curve(paged, num_rows)
    draft = {kind: rank.measure(num_rows, with_features=kind) for kind in kinds}
    return _logged("separate", num_rows, PlacementCosts(target, draft))


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
        order: does nothing ahead.
        num_branches: None leaves them to the costs, which may ask for none.
        compares_branches: where there are to be branches, ahead without any too.
    """
    known = costs.of(order)
    orders = [dataclasses.replace(order, costs=known)]
    counts = [0, num_branches] if compares_branches and num_branches != 0 else [num_branches]
    for count in counts:
        ahead = plan_ahead(
            known, num_rows=order.num_slots, max_draft_tokens=order.max_draft_tokens, num_branches=count
        )
        if orders[-1].ahead != ahead:
            orders.append(dataclasses.replace(orders[0], ahead=ahead))
    wanted = {IN_TURNS: False, AHEAD: True}
    return [item for item in orders if (item.ahead.num_tokens > 0) in [wanted[name] for name in overlaps]]


def _target_curve(paged: PagedPair, num_rows: int) -> Curve:
    terms = paged.terms
    return measure_curve(
        paged.target,
        partial(judge_logits, settings=terms.settings, vocab_size=terms.vocab_size),
        num_rows=num_rows,
        num_tokens_per_row=terms.max_draft_tokens + 1,
        num_context_tokens=terms.num_context_tokens,
    )


def _logged(placement: str, num_rows: int, costs: PlacementCosts) -> PlacementCosts:
    [draft, *_] = costs.draft.values()
    logger.info(
        "%s, batch %d: a target pass of one token per row takes %.2f ms, a draft step %.2f ms",
        placement,
        num_rows,
        float(costs.target(num_rows)) / 1e6,
        float(draft(num_rows)) / 1e6,
    )
    return costs
