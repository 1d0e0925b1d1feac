"""A rank's part of a replica: its models, its share of the cache, and its loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from specdist.config.generate import GenerateConfig
from specdist.engine.assembly import Assembly
from specdist.engine.draft.draft_worker import DraftWorker
from specdist.engine.draft.no_draft import NoDraft
from specdist.engine.draft.remote import RemoteDraft, serve_draft
from specdist.engine.engine import Engine
from specdist.engine.interfaces import Proposer, Target
from specdist.engine.request import Requests
from specdist.engine.schedule.detokenizer import NO_TEXT
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.target.collectives import RANK_ZERO, connect_draft, connect_target
from specdist.engine.times.stats_recorder import StatsRecorder
from specdist.engine.times.timeline import Timeline, clock_of
from specdist.job.costs.allocation import BatchLimits, CacheRoom, refusal, room_for_cache
from specdist.job.costs.kept_costs import KeptCosts, costs_key
from specdist.job.costs.measuring import measure_costs
from specdist.job.memory import memory_settings
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.restart import remember_lone_row
from specdist.job.ranks.topology import Topology, broadcast_from_rank0, gathered
from specdist.job.replica.loaded_models import LoadedModels
from specdist.job.replica.model_plan import ModelPlan, batch_limits
from specdist.job.replica.runners import with_states
from specdist.job.texts.processing import sampling_settings
from specdist.job.workload import UNKNOWN_WORK, Workload
from specdist.models.loading.loading_check import LoadingCheck
from specdist.models.loading.memory import GraphMemory
from specdist.models.passes.runner import ModelRunner
from specdist.policies.choice import build_policy
from specdist.policies.costs import BRANCH_COUNTS, CostModel
from specdist.policies.payoff import ALONE, ASSUMED_ACCEPTANCE, RoundChooser, RoundShape, plan_ahead
from specdist.policies.registry import needs_costs, uses_features
from specdist.utils.errors import UserError


class Replica:
    """This rank's part of a replica. All ranks construct it at the same time."""

    # See :attr:`CacheRoom.graph_bytes`.
    _graph_bytes = 0

    def __init__(
        self,
        config: GenerateConfig,
        models: ModelPlan,
        topology: Topology,
        frozen_costs: CostModel | None = None,
        agree: Callable[[CostModel], CostModel] | None = None,
        *,
        workload: Workload = UNKNOWN_WORK,
        num_spare_branches: int = 0,
        num_halvings: int = 0,
        activity: Activity | None = None,
    ) -> None:
        """
        Args:
            frozen_costs: costs of passes of a resumed run; the same on every rank.
            agree: called on rank 0 with the measured costs; returns those that the replica uses. None uses
                the measured ones.
            workload: what the prompts promise, as far as it is known; the same on every rank.
            num_halvings: how often the batch was halved because memory ran out.
            num_spare_branches: branches of one token in the draft's cache, for use outside of rounds.
            activity: gets the phases of the loading, and its steps.
        """
        self._activity = activity or Activity()
        self._models = models
        self._topology = topology
        self._agree = agree
        self._workload = workload
        self._num_spare_branches = num_spare_branches
        self._num_halvings = num_halvings
        self._set_sampling(config)
        # Smaller limits after memory ran out in a round. The slots and their memory stay as they are.
        self._limits: SchedulerSettings | None = None
        loaded = LoadedModels(config, models, topology, self.settings, self._activity)
        self._target, self._draft, self._group = loaded.target, loaded.draft, loaded.group
        self._loading_check = loaded.check
        self.num_weight_bytes = loaded.num_weight_bytes
        self._activity.begin("sizing the cache")
        self.ahead = ALONE
        self._chooser: RoundChooser | None = None
        self.num_pages = self._agree_on_pages()
        self._allocate()
        self.costs: CostModel | None
        self.costs = (frozen_costs or self._agree_on_costs()) if self._needs_costs else None
        self._set_policy()

    def resample(self, config: GenerateConfig) -> None:
        """Generate with these options from now on, with the loaded models and their caches.

        Only the sampling settings, the seed and the length of completions may differ.
        """
        settings = self.settings
        self._set_sampling(config)
        if self._needs_costs and self.settings != settings:
            self.costs = self._agree_on_costs()
        self._set_policy()

    def _set_sampling(self, config: GenerateConfig) -> None:
        self._config = config
        self.settings = sampling_settings(config, self._models.target, self._models.vocab_size)
        self._scheduling = batch_limits(config, self._models, self._num_halvings)

    def _set_policy(self) -> None:
        config = self._config
        self._policy = build_policy(config.policy_choice, self.costs, is_coupled=config.is_coupled)
        self.ahead, self._chooser = ALONE, None
        if self._works_ahead:
            assert self.costs is not None
            if config.drafts_ahead:
                self.ahead = self._fixed_work_ahead(self.costs)
            else:
                most, choice = self._policy.max_draft_tokens, config.policy_choice
                self.ahead = RoundShape(num_ahead=most + 1, num_branches=max(self._branch_counts))
                # It has learned nothing yet.
                self._chooser = RoundChooser(
                    self.costs,
                    max_draft_tokens=most,
                    fixed_length=choice.first_length if choice.policy == "fixed" else None,
                    branch_counts=self._branch_counts,
                )
            num_ahead_tokens = self.ahead.num_ahead + self._num_forced
            self._scheduling = dataclasses.replace(self._scheduling, num_ahead_tokens=num_ahead_tokens)

    @property
    def _num_forced(self) -> int:
        """Most tokens of a block, or ahead, that a constraint may force on top of those that are drawn."""
        return self._scheduling.max_draft_tokens - self._config.policy_choice.max_draft_tokens

    def _fixed_work_ahead(self, costs: CostModel) -> RoundShape:
        """The same in all rounds, so that a restart repeats every block: of ``--overlap ahead``."""
        return plan_ahead(
            costs,
            # Not the halved batch: block lengths depend on it, and must not depend on the memory.
            num_rows=self._workload.rows_at_a_time(batch_limits(self._config, self._models).num_slots),
            max_draft_tokens=self._policy.max_draft_tokens,
            num_branches=self._config.num_branches,
            acceptance=ASSUMED_ACCEPTANCE,
        )

    @property
    def _works_ahead(self) -> bool:
        """Whether rounds in which the draft works ahead are possible."""
        may = self._config.drafts_ahead or self._config.chooses_rounds
        return may and self._topology.has_draft_rank

    @property
    def _needs_costs(self) -> bool:
        return self._works_ahead or needs_costs(self._config.policy)

    @property
    def _branch_counts(self) -> tuple[int, ...]:
        """Numbers of branches per sequence to choose from."""
        asked = self._config.num_branches
        return BRANCH_COUNTS if asked is None else (asked,)

    @property
    def num_slots(self) -> int:
        """Most sequences that run at a time."""
        return self._scheduling.num_slots

    @property
    def runners(self) -> tuple[ModelRunner, ModelRunner]:
        """Target and draft of the colocated placement, for use without an engine."""
        assert self._target is not None
        return self._target, self.draft_runner

    @property
    def draft_runner(self) -> ModelRunner:
        """The draft, on the rank that holds it."""
        assert self._draft is not None
        return self._draft

    @property
    def loading_check(self) -> LoadingCheck:
        """On rank 0: the result of comparing the loaded target with its files."""
        assert self._loading_check is not None
        return self._loading_check

    def serve(self) -> None:
        """The loop of all ranks except rank 0."""
        if self._topology.holds_target:
            assert self._target is not None and self._group is not None
            self.assembly().serve_target(self._target, self._group)
        else:
            clock = Timeline("transfer", clock=clock_of(self._topology.device))
            serve_draft(self._draft_worker(clock), RANK_ZERO, vocab_size=self._models.vocab_size, clock=clock)

    def engine(self, requests: Requests, stop_rules: StopRules, stats_recorder: StatsRecorder) -> Engine:
        """Rank 0's engine over these requests."""
        return self.assembly(stop_rules).engine(
            requests,
            target=self.rank0_target(),
            proposer=self._proposer(),
            stats_recorder=stats_recorder,
            limits=self._limits,
            on_resize=partial(setattr, self, "_limits"),
            on_lone_row=remember_lone_row,
        )

    def assembly(self, stop_rules: StopRules | None = None) -> Assembly:
        """The assembly of this rank's models. ``stop_rules``: by default the target's stop tokens."""
        return Assembly(
            settings=self.settings,
            vocab_size=self._models.vocab_size,
            stop_rules=stop_rules or StopRules(NO_TEXT, self._models.target.stop_token_ids()),
            scheduling=self._scheduling,
            num_pages=self.num_pages,
            ahead=self.ahead,
            chooser=self._chooser,
            is_traced=self._config.is_traced,
            trusts_draft=not self._config.is_exact,
            memory=memory_settings(self._config, self._topology, vars(self).get("costs"), self._models),
            masker=self._models.constraints.new_masker(self._models.vocab_size),
        )

    def draft_engine(self, requests: Requests, stop_rules: StopRules) -> Engine:
        """An engine that generates with the draft alone, on the rank that holds it."""
        scheduling = dataclasses.replace(
            self._scheduling, max_num_seqs=self.num_slots, max_draft_tokens=0, num_ahead_tokens=0
        )
        assembly = dataclasses.replace(
            self.assembly(stop_rules), scheduling=scheduling, is_traced=False, trusts_draft=False
        )
        return assembly.engine(
            requests,
            target=assembly.local_target(self.draft_runner),
            proposer=NoDraft(),
            stats_recorder=StatsRecorder(),
        )

    def _agree_on_pages(self) -> int:
        """The number of pages that fit into the memory of every rank: all follow one page table."""
        num_branch_slots, max_branch_tokens = self._room_for_branches()
        limits = BatchLimits(
            scheduling=self._scheduling,
            num_branch_slots=num_branch_slots,
            max_branch_tokens=max_branch_tokens,
            works_ahead=self._works_ahead,
        )
        if self._topology.device.type == "cuda" and self._topology.world_size > 1:
            # What cannot fit is refused before a rank runs out of memory in a collective.
            self._least_room(limits, is_connected=False)
            self._connect(limits)
        return self._least_room(limits).num_pages

    def _least_room(self, limits: BatchLimits, *, is_connected: bool = True) -> CacheRoom:
        """Of the rank with the least. Raises :class:`UserError` on all if it does not hold one sequence."""
        room = room_for_cache(
            self._config,
            self._models,
            self._topology,
            limits,
            target=self._target,
            draft=self._draft,
            is_connected=is_connected,
        )
        self._graph_bytes = room.graph_bytes
        room = min(gathered(self._topology, room), key=lambda found: found.num_pages)
        if room.num_pages < limits.pages_per_seq:
            raise UserError(refusal(self._config, limits, room))
        return room

    def _connect(self, limits: BatchLimits) -> None:
        """Let NCCL take the memory of all that its ranks will send, so that it is measured with the rest."""
        topology = self._topology
        self._activity.begin("connecting the GPUs")
        if self._target is not None and self._group is not None:
            num_tokens = limits.scheduling.max_num_batched_tokens
            hidden_size = self._models.target.config.get_text_config().hidden_size
            connect_target(
                self._group,
                torch.zeros(num_tokens, hidden_size, dtype=self._target.dtype, device=topology.device),
            )
        if topology.has_draft_rank and topology.rank in (RANK_ZERO, topology.draft_rank):
            row_V = torch.zeros(self._models.vocab_size, device=topology.device)
            connect_draft(topology.draft_rank, row_V)
        self._activity.begin("sizing the cache")

    def _allocate(self) -> None:
        if self._target is not None:
            self.assembly().allocate(self._target)
        if self._draft is not None:
            self.assembly().allocate_draft(self._draft, *self._room_for_branches())
        if self._topology.device.type == "cuda":
            memory = GraphMemory(self._topology.device, self._graph_bytes)
            for runner in (self._target, self._draft):
                if runner is not None:
                    runner.limit_graphs(memory)

    def _room_for_branches(self) -> tuple[int, int]:
        """Number of branches in this rank's cache, and the most tokens of each. For a draft that works ahead
        it is the most that the costs, which are not measured yet, may ask for."""
        if self._draft is None:
            return 0, 0
        if not self._works_ahead:
            return self._num_spare_branches, 1
        return self.num_slots * max(self._branch_counts), self._scheduling.max_draft_tokens + 1

    def _agree_on_costs(self) -> CostModel:
        """Rank 0's, kept from an earlier start or measured, are frozen and used by all."""
        kept: KeptCosts | None = None
        costs: CostModel | None = None
        if self._topology.is_rank0:
            models, slots = self._models, self.num_slots
            kept = KeptCosts(costs_key(self._config, models, self._topology, self._workload, num_slots=slots))
            costs = kept.read()
        costs = broadcast_from_rank0(self._topology, costs)
        if costs is None:
            costs = self._measure_costs()
            if kept is not None:
                kept.write(costs)
        if self._topology.is_rank0 and self._agree is not None:
            costs = self._agree(costs)
        return broadcast_from_rank0(self._topology, costs)

    def _measure_costs(self) -> CostModel:
        """Of all ranks together; rank 0's count."""
        num_branch_slots, _ = self._room_for_branches()
        return measure_costs(
            self.assembly(),
            self._topology,
            self._workload,
            target=self._target,
            draft=self._draft,
            group=self._group,
            num_branch_slots=num_branch_slots,
            max_seq_len=self._models.max_seq_len,
            uses_features=self._config.is_traced or uses_features(self._config.policy),
            asks_draft=self._works_ahead,
            begin=self._activity.begin,
        )

    def rank0_target(self) -> Target:
        """The target on rank 0; the other target ranks follow its passes in :meth:`serve`."""
        assert self._target is not None
        if self._group is None:
            return self.assembly().local_target(self._target)
        return self.assembly().sharded_target(self._target, self._group)

    def _proposer(self) -> Proposer:
        if self._config.uses_memory:
            return self.assembly().memory_draft()
        if not self._topology.uses_draft:
            return NoDraft()
        if self._topology.is_colocated:
            return with_states(self.assembly().local_draft(self.draft_runner, self._policy), self._target)
        draft = RemoteDraft(self._topology.draft_rank, device=self._topology.device)
        return with_states(self.assembly().asked_when_it_pays(draft), self._target)

    def _draft_worker(self, clock: Timeline | None = None) -> DraftWorker:
        return self.assembly().draft_worker(self.draft_runner, self._policy, clock)
