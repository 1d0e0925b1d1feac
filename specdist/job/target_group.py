"""A target group whose drafts serve others, too: a replica in all but its draft."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from specdist.config.generate import GenerateConfig
from specdist.engine.interfaces import Proposer
from specdist.engine.shared_draft import Dialer, LinkedDraft, SharedDraft
from specdist.engine.sockets import Link
from specdist.job.measuring import (
    LEAST_BUDGET_S,
    ModelTimes,
    combined_costs,
    context_of,
    measure_target,
    message_curve,
)
from specdist.job.model_plan import ModelPlan
from specdist.job.pass_times import Budget
from specdist.job.replica import Replica
from specdist.job.reproducibility import reproducibility
from specdist.job.shared_drafts import DraftDirectory, terms_of
from specdist.job.topology import LONGEST_TIMEOUT_S, Topology, broadcast_from_rank0, launch_store
from specdist.policies.costs import CostModel, Curve
from specdist.stats.regression import NS_PER_S

FOLDER_KEY = "folder"
# Between two looks for the group's own draft, while another serves it.
OWN_RETRY_S = 2.0

Planned = TypeVar("Planned")

logger = logging.getLogger(__name__)


def decodes_alone(config: GenerateConfig, topology: Topology) -> bool:
    """Whether a group without a draft goes on. Not where its tokens depend on one: under rejection, in a run
    whose seed fixes them, and in a lossy one."""
    is_free = config.is_coupled or reproducibility(config, topology) == "distribution"
    return config.is_exact and is_free


def plan_in_turn(config: GenerateConfig, topology: Topology, plan: Callable[[], Planned]) -> Planned:
    """Where the first group deletes the results of an earlier run, the others wait for that."""
    assert topology.part is not None
    if not config.overwrite:
        return plan()
    store = launch_store()
    if topology.part.index:
        store.wait([FOLDER_KEY], timedelta(seconds=min(config.rank_timeout, LONGEST_TIMEOUT_S)))
    planned = plan()
    store.set(FOLDER_KEY, "open")
    return planned


def common_pages(of_target: int, of_draft: int) -> int:
    """Pages of a group's cache: its target's and its draft's have the same numbers."""
    if of_draft < of_target:
        logger.warning(
            "the draft's cache has %d pages for each target group, which limits a group whose target has "
            "room for %d: with --draft_window the draft keeps a sequence's last tokens, and limits none; "
            "or give more drafts (--num_drafts)",
            *(of_draft, of_target),
        )
    return min(of_target, of_draft)


class TargetGroup(Replica):
    """A rank's part of it."""

    def __init__(
        self, config: GenerateConfig, models: ModelPlan, topology: Topology, *arguments: Any, **options: Any
    ) -> None:
        """As a :class:`Replica`."""
        self._drafts = DraftDirectory(topology, timeout_s=config.draft_timeout) if topology.is_rank0 else None
        self._tell_draft: Callable[[int | None], None] = lambda draft: None
        super().__init__(config, models, topology, *arguments, **options)

    def tell(self, tell_draft: Callable[[int | None], None]) -> None:
        """``tell_draft``: gets the number of the draft that serves the group, whenever that changes."""
        self._tell_draft = tell_draft

    def _agree_on_pages(self) -> int:
        """Not more than the draft has for each group."""
        num_pages = super()._agree_on_pages()
        found: int | None = None
        if self._drafts is not None:
            self._activity.begin("waiting for the draft to load")
            wait_s = self._config.rank_timeout if self._must_have_draft else self._config.draft_timeout
            found = self._drafts.num_pages(wait_s)
            if found is None:
                logger.warning("no draft is ready after %.0f s: beginning without one", wait_s)
        found = broadcast_from_rank0(self._topology, found)
        return num_pages if found is None else common_pages(num_pages, found)

    @property
    def _must_have_draft(self) -> bool:
        return self._needs_costs or not decodes_alone(self._config, self._topology)

    def _measure_costs(self) -> CostModel:
        """The draft measures its own passes, once for all groups."""
        of_target, budget = None, Budget(LEAST_BUDGET_S * NS_PER_S)
        self._activity.begin("measuring passes of the target")
        if self._target is not None:
            of_target = measure_target(
                self.assembly(),
                self._target,
                self._group,
                workload=self._workload,
                max_seq_len=self._models.max_seq_len,
                budget=budget,
            )
        costs: CostModel | None = None
        if self._drafts is not None and of_target is not None:
            self._activity.begin("waiting for the draft's times")
            link, welcome = self._drafts.dial(self._greeting("costs") | {"budget_ns": budget.left_ns})
            num_rows = self._workload.rows_at_a_time(self.num_slots)
            message = Curve([1], [0])
            if self._works_ahead:
                message = message_curve(self.assembly(), LinkedDraft(link), self._topology.device, num_rows)
            else:
                link.close()
            of_draft = ModelTimes(
                Curve(**welcome["curve"]),
                tuple(welcome["slopes"]),
                Curve(**welcome["turns"]),
                Curve(**welcome["ahead"]),
            )
            context, _ = context_of(self.assembly(), self._workload, self._models.max_seq_len)
            costs = combined_costs(of_target, of_draft, message, context, num_rows)
        return broadcast_from_rank0(self._topology, costs)

    def _greeting(self, purpose: str) -> dict[str, Any]:
        costs = self.costs.to_json() if purpose == "work" and self.costs is not None else None
        terms = terms_of(self._config, self._models, self._scheduling.max_draft_tokens)
        return {
            "purpose": purpose,
            "terms": terms,
            "costs": costs,
            "num_slots": self.num_slots,
            "workload": dataclasses.asdict(self._workload),
        }

    def _proposer(self) -> Proposer:
        assert self._drafts is not None
        drafts, greeting = self._drafts, self._greeting("work")

        def dial(own_alone: bool = False) -> Link:
            return drafts.dial(greeting, own_alone=own_alone)[0]

        def begin(link: Link) -> Proposer:
            self._tell_draft(link.draft)
            return self.assembly().asked_when_it_pays(LinkedDraft(link))

        return SharedDraft(
            Dialer(dial),
            begin,
            decodes_alone=decodes_alone(self._config, self._topology),
            repeats_blocks=not self._config.is_coupled,
            first_wait_s=self._config.draft_timeout,
            longest_wait_s=self._config.rank_timeout,
            on_loss=lambda: self._tell_draft(None),
            own_draft=drafts.own_draft,
            new_own_dialer=lambda: Dialer(
                partial(dial, own_alone=True),
                retry_s=OWN_RETRY_S,
                says="its own draft is not back yet",
            ),
        )
