"""A draft that several target groups share, in a process of its own: its cache, and its loop.

It needs neither the prompts nor the run folder: whatever it must know a group says when it connects.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.data.storage import local_folder
from specdist.engine.device_clock import clock_of
from specdist.engine.draft_ahead import DraftAhead
from specdist.engine.draft_server import DraftServer
from specdist.engine.draft_worker import DraftWorker
from specdist.engine.grouping import GroupSizes
from specdist.engine.limits import SchedulerSettings
from specdist.engine.timeline import Timeline
from specdist.job.activity import Activity
from specdist.job.allocation import BatchLimits, refusal, room_for_cache
from specdist.job.logs import add_run_log
from specdist.job.measuring import measure_draft
from specdist.job.model_plan import ModelPlan
from specdist.job.pass_times import Budget
from specdist.job.replica import Replica
from specdist.job.shared_drafts import Listeners, check_greeting, is_same_user, terms_of
from specdist.job.topology import Topology
from specdist.job.workload import Workload
from specdist.policies import FixedLength
from specdist.policies.costs import CostModel
from specdist.policies.registry import uses_features
from specdist.utils.errors import UserError
from specdist.utils.json_values import from_fields

logger = logging.getLogger(__name__)


class DraftPart(Replica):
    """The draft of ``num_targets`` groups, each with its own slots and pages side by side."""

    def __init__(
        self, config: GenerateConfig, models: ModelPlan, topology: Topology, *, activity: Activity
    ) -> None:
        self._num_groups = topology.num_targets
        self._worker: DraftWorker | None = None
        self._measured: dict[str, Any] | None = None
        self._costs_json: dict[str, Any] | None = None
        super().__init__(config, models, topology, activity=activity)
        self._clock = Timeline("transfer", clock=clock_of(topology.device))
        self._terms = terms_of(config, models, self._scheduling.max_draft_tokens)

    @property
    def _needs_costs(self) -> bool:
        """A group brings them."""
        return False

    def _set_policy(self) -> None:
        """When the first group has connected."""

    @property
    def _scheduling_of_all(self) -> SchedulerSettings:
        """The batches of all groups together."""
        return dataclasses.replace(
            self._scheduling,
            max_num_seqs=self._num_groups * self.num_slots,
            max_num_batched_tokens=self._num_groups * self._scheduling.max_num_batched_tokens,
        )

    def _agree_on_pages(self) -> int:
        """Pages of each group."""
        num_groups = self._num_groups
        num_branch_slots, max_branch_tokens = self._room_for_branches()
        limits = BatchLimits(
            scheduling=self._scheduling_of_all,
            num_branch_slots=num_groups * num_branch_slots,
            max_branch_tokens=max_branch_tokens,
            works_ahead=self._works_ahead,
        )
        room = room_for_cache(
            self._config, self._models, self._topology, limits, target=None, draft=self._draft
        )
        if room.num_pages // num_groups < limits.pages_per_seq:
            raise UserError(refusal(self._config, limits, room))
        return room.num_pages // num_groups

    def serve_groups(self) -> None:
        """Until this process is ended."""
        spans_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        self._listeners = Listeners(spans_machines=spans_machines)
        server = DraftServer(
            self._listeners.sockets,
            GroupSizes(num_groups=self._num_groups, num_slots=self.num_slots, num_pages=self.num_pages),
            self._worker_for,
            clock=self._clock,
            is_allowed=is_same_user,
        )
        self._listeners.publish(self._topology, num_pages=self.num_pages)
        self._activity.begin("serving target groups", has_progress=True)
        server.run(self._go_on)

    def _go_on(self) -> bool:
        self._activity.step()
        return False

    def _worker_for(self, greeting: Mapping[str, Any]) -> tuple[DraftWorker, dict[str, Any]]:
        """See :class:`DraftServer`."""
        check_greeting(greeting, self._listeners.token, self._terms)
        if greeting.get("num_slots", 0) > self.num_slots:
            raise ValueError(f"{greeting['num_slots']} sequences at a time, more than {self.num_slots}")
        self._workload = from_fields(Workload, greeting.get("workload"))
        if greeting.get("purpose") == "costs":
            if self._measured is None:
                self._measured = self._measure_passes(float(greeting["budget_ns"]))
            # Neither drafts nor branches: no pass is run.
            worker = self.assembly().draft_worker(
                self.draft_runner, FixedLength(0), self._clock, ahead=DraftAhead(),
                num_groups=self._num_groups,
            )  # fmt: skip
            return worker, self._measured
        costs = greeting.get("costs")
        if self._worker is None:
            self._log_to_file()
            self.costs = None if costs is None else CostModel.from_json(costs)
            self._costs_json = costs
            super()._set_policy()
            self._worker = self.assembly().draft_worker(
                self.draft_runner, self._policy, self._clock, num_groups=self._num_groups
            )
        elif costs != self._costs_json:
            raise ValueError("the costs of passes are not those of the other target groups")
        return self._worker, {}

    def _log_to_file(self) -> None:
        """A group has opened the run folder."""
        assert self._topology.part is not None
        add_run_log(
            local_folder(self._config.output, self._config.spool)
            / "logs"
            / f"{self._topology.part.name}.log",
            self._topology.role,
        )

    def _measure_passes(self, budget_ns: float) -> dict[str, Any]:
        """Of steps of all groups' sequences and branches."""
        num_branch_slots, _ = self._room_for_branches()
        found = measure_draft(
            dataclasses.replace(self.assembly(), scheduling=self._scheduling_of_all),
            self.draft_runner,
            num_branch_slots=self._num_groups * num_branch_slots,
            workload=self._workload,
            budget=Budget(budget_ns),
            max_seq_len=self._models.max_seq_len,
            uses_features=self._config.is_traced or uses_features(self._config.policy),
            chooses_rounds=self._works_ahead,
        )
        curves = {"curve": found.passes, "turns": found.turns, "ahead": found.ahead}
        return {name: dataclasses.asdict(curve) for name, curve in curves.items()} | {"slopes": found.slopes}
