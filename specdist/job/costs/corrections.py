"""Measured costs are corrected during a run, so that one that was begun on a busy machine comes back.

Real rounds say what passes take. Where they differ from the costs, these are scaled. A run whose costs say
that drafting never pays has no rounds with drafts to tell: both models are measured again, more and more
seldom.

Where tokens or block lengths depend on the costs, they change before a shard's first row alone: the batch
drains, and the shard's statistics say which costs it was begun with, so that a restart goes on with them. The
manifest has all of them. Asynchronous runs whose tokens a seed fixes are not corrected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.job.run.preflight import RunPlan, freeze_costs
from specdist.job.totals.report import all_costs
from specdist.policies.costs import Agree, CostModel, Curve
from specdist.policies.pass_ratios import MOST_OFF, PassRatios

# Passes of the target without a draft after which both models are measured again; and so many times as many
# until the next time.
MANY_PASSES, MORE_PASSES = 256, 4

logger = logging.getLogger(__name__)


class Corrections:
    """Corrections of the costs, on rank 0; ``ratios`` compares real rounds with the costs in use."""

    def __init__(self, run: RunPlan, costs: CostModel, *, at_any_time: bool) -> None:
        """``at_any_time``: neither tokens nor block lengths have to be repeated by a restart."""
        self._run, self._at_any_time = run, at_any_time
        self._many_passes = MANY_PASSES
        self.ratios = PassRatios(costs)
        self._use(costs)

    def may_begin(self, shard: Stats, *, is_new: bool) -> bool:
        """Whether a row of this shard may begin with the costs in use. ``is_new``: it is the first one."""
        if is_new or self._at_any_time:
            if self._is_off or (is_new and all_costs(self._run.folder)[-1] != self.ratios.costs):
                return False
            shard.costs_revision = self._revision
        return shard.costs_revision == self._revision

    def change(
        self, shard: Stats, use: Callable[[CostModel | None, Agree], CostModel], *, is_new: bool
    ) -> None:
        """Nothing runs: go on with the costs for this shard. ``use``: is given them, or None where they are
        to be measured and agreed on, and returns them."""
        found = all_costs(self._run.folder)
        costs: CostModel | None = found[min(shard.costs_revision, len(found) - 1)]
        if is_new or self._at_any_time:
            costs, factors = found[-1], self.ratios.factors()
            # Else another replica has corrected them.
            if costs == self.ratios.costs and factors is not None:
                logger.warning(
                    "in real rounds passes of the target take %.3g times as long as measured, and drafting "
                    "%.3g times: from now on these times decide",
                    *factors,
                )
                costs = freeze_costs(self._run, scaled(costs, *factors), instead_of=costs)
            elif costs == self.ratios.costs and self._is_off:
                logger.info("nothing has been drafted: what passes take is measured again")
                costs = None
        self._use(use(costs, self._agree))
        shard.costs_revision = self._revision

    @property
    def _is_off(self) -> bool:
        is_alone = not self.ratios.has_drafted and self.ratios.num_target_passes >= self._many_passes
        return is_alone or self.ratios.factors() is not None

    def _agree(self, measured: CostModel) -> CostModel:
        """The new costs, unless the old ones say about the same."""
        self._many_passes *= MORE_PASSES
        costs = self.ratios.costs
        rows = costs.context.num_rows
        old, new = (each.drafting_ns(rows) / float(each.target(rows)) for each in (costs, measured))
        if old <= MOST_OFF * new and new <= MOST_OFF * old:
            return costs
        return freeze_costs(self._run, measured, instead_of=costs)

    def _use(self, costs: CostModel) -> None:
        found = all_costs(self._run.folder)
        self._revision = found.index(costs) if costs in found else len(found) - 1
        self.ratios.restart(costs)


def scaled(costs: CostModel, of_target: float, of_drafting: float) -> CostModel:
    """The costs if passes of the target and drafting take so many times as long."""

    def times(curve: Curve, factor: float) -> Curve:
        return Curve(curve.sizes, np.rint(np.asarray(curve.ns) * factor).astype(int).tolist())

    context = replace(
        costs.context,
        target_row_ns=of_target * costs.context.target_row_ns,
        target_token_ns=of_target * costs.context.target_token_ns,
        draft_row_ns=of_drafting * costs.context.draft_row_ns,
        block_row_ns=of_drafting * costs.context.block_row_ns,
    )
    names = ("draft", "synchronous", "asynchronous")
    drafting = {name: times(getattr(costs, name), of_drafting) for name in names}
    return replace(costs, target=times(costs.target, of_target), context=context, **drafting)
