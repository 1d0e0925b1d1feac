"""A rank's part of a replica: its models, its share of the cache, and its loop."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdist.config.generate import GenerateConfig
from specdist.config.groups import HOST_SEQS
from specdist.engine.assembly import PAGE_SIZE, Assembly
from specdist.engine.draft.client import Draft, ToRank
from specdist.engine.engine import Engine
from specdist.engine.messages.interfaces import Proposer, Target
from specdist.engine.request import Requests
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.engine.schedule.stopping import StopRules
from specdist.engine.target.sharded_target import RANK_ZERO, Collectives
from specdist.job.costs.allocation import CacheRoom, refusal, room_for_cache
from specdist.job.costs.measuring import measure_costs
from specdist.job.costs.rehearsal import rehearsed_costs
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.restart import remember_lone_row
from specdist.job.ranks.topology import broadcast_from_rank0, gathered
from specdist.job.replica.loaded_models import LoadedModels, load_models
from specdist.job.replica.plan import ReplicaPlan
from specdist.job.texts.constraints import RunConstraints
from specdist.models.cache.windowed_pages import longest_window
from specdist.models.passes.all_reduce import SUMMING, SUMS
from specdist.models.passes.graphs import GraphMemory
from specdist.models.passes.products import PRODUCTS
from specdist.models.passes.runner import ModelRunner
from specdist.models.start_check.loading_check import LoadingCheck
from specdist.policies.costs import Agree, CostModel
from specdist.policies.payoff import RoundShape
from specdist.policies.registry import uses_features
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)


def build_replica(
    plan: ReplicaPlan,
    frozen_costs: CostModel | None = None,
    agree: Agree | None = None,
    activity: Activity | None = None,
) -> Replica:
    """Load the models, share out the memory, and measure what is not known. All ranks call it at the same
    time. Raises :class:`UserError` on all of them.

    Args:
        frozen_costs: on rank 0, the costs of passes of a resumed run.
        agree: called on rank 0 with the measured costs; returns those that the replica uses. None uses
            the measured ones.
        activity: gets the phases of the loading, and its steps.
    """
    activity = activity or Activity()
    loaded = load_models(plan.config, plan.models, plan.topology, activity)
    activity.begin("sizing the cache")
    plan, room, graph_bytes = _agree_on_pages(plan, loaded, activity)
    assembly = plan.assembly(room)
    if loaded.target is not None:
        assembly.allocate(loaded.target)
    if loaded.draft is not None:
        assembly.allocate_draft(loaded.draft, plan.limits.num_branch_slots, plan.limits.max_branch_tokens)
    if plan.topology.device.type == "cuda":
        memory = GraphMemory(plan.topology.device, graph_bytes)
        for runner in loaded.runners:
            runner.limit_graphs(memory)
    return Replica(plan, loaded, room, frozen_costs, agree, activity)


def _agree_on_pages(
    plan: ReplicaPlan, loaded: LoadedModels, activity: Activity
) -> tuple[ReplicaPlan, CacheRoom, int]:
    """The room of the rank with the least, since all follow one page table; and this rank's bytes for
    recorded passes: see :attr:`CacheRoom.graph_bytes`. The plan then says how many sequences there is room
    for."""
    if plan.config.fills_memory(plan.topology.device.type):
        plan = _with_room(plan, loaded)
    plan = _with_windows(plan, loaded)
    if plan.topology.device.type == "cuda" and plan.topology.world_size > 1:
        # What cannot fit is refused before a rank runs out of memory in a collective.
        _rooms(plan, loaded, is_connected=False)
        _connect(plan, loaded, activity)
    own, least = _rooms(plan, loaded)
    return plan, least, own.graph_bytes


def _with_room(plan: ReplicaPlan, loaded: LoadedModels) -> ReplicaPlan:
    """The plan with the most sequences, halved from all that may run, for which the cache has room beside
    what their passes need: for half of a typical context of each, which is known from prompts and the most
    tokens of completions. The same on all ranks. Sequences get pages as they grow, so that more of them run
    while they are short; if the pages run out, the youngest waits."""
    least_seqs = min(HOST_SEQS, plan.scheduling.max_num_seqs)
    num_seqs = plan.scheduling.max_num_seqs
    while True:
        plan = dataclasses.replace(plan, num_seqs=num_seqs)
        _, rooms = _layouts(plan, loaded, is_connected=False)
        wanted = plan.scheduling.num_slots * plan.workload.num_context_tokens // 2
        if num_seqs <= least_seqs or max(room.num_pages for room in rooms) * PAGE_SIZE >= wanted:
            return plan
        num_seqs = max(least_seqs, num_seqs // 2)


def _with_windows(plan: ReplicaPlan, loaded: LoadedModels) -> ReplicaPlan:
    """The plan with fewer sequences, halved, if more of them run: windowed layers have pages for all that may
    run at a time, and where memory is tight these leave too few to the others. Counted as in
    :func:`_with_room`."""
    context = plan.workload.num_context_tokens or plan.scheduling.max_seq_len
    best, most, tried = plan, 0, plan
    while True:
        _, rooms = _layouts(tried, loaded, is_connected=False)
        whole, own = rooms
        if own.windowed is None:
            return best
        num_slots = tried.scheduling.num_slots
        holds = [room.num_pages >= tried.limits.pages_per_seq for room in rooms]
        of_whole, of_own = (
            min(num_slots, room.num_pages * PAGE_SIZE // (context // 2 or 1)) * is_enough
            for room, is_enough in zip(rooms, holds, strict=True)
        )
        if tried is plan:
            most = max(of_whole, of_own)
        elif of_own > most and own.num_pages >= whole.num_pages:
            best, most = tried, of_own
        if num_slots in (1, of_own):
            return best
        tried = dataclasses.replace(tried, num_seqs=num_slots // 2)


def _layouts(
    plan: ReplicaPlan, loaded: LoadedModels, *, is_connected: bool
) -> tuple[tuple[CacheRoom, CacheRoom], tuple[CacheRoom, CacheRoom]]:
    """The layouts with the pages of all layers, and with pages of their own for windowed layers; without such
    layers both are the same. On this rank, and on the rank with the least."""
    windowed = None
    if loaded.target is not None and plan.may_give_back:
        window = longest_window(loaded.target.windows.values(), plan.scheduling.max_seq_len)
        windowed = window and plan.scheduling.windowed_layers(window, PAGE_SIZE)
    room = partial(
        room_for_cache,
        plan.config,
        plan.models,
        plan.topology,
        plan.limits,
        target=loaded.target,
        draft=loaded.draft,
        is_connected=is_connected,
    )
    whole = room()
    own = whole, (room(windowed=windowed) if windowed else whole)
    everywhere = gathered(plan.topology, own)
    least_whole, least = (
        min((rooms[index] for rooms in everywhere), key=lambda found: found.num_pages) for index in (0, 1)
    )
    of_target = everywhere[RANK_ZERO][1].windowed
    return own, (least_whole, dataclasses.replace(least, windowed=of_target))


def _rooms(
    plan: ReplicaPlan, loaded: LoadedModels, *, is_connected: bool = True
) -> tuple[CacheRoom, CacheRoom]:
    """This rank's, logged once all are connected, and that of the rank with the least. Raises
    :class:`UserError` on all if it does not hold one sequence. Windowed layers have pages of their own where
    that leaves others no fewer."""
    (whole, windowed), (least_whole, least) = _layouts(plan, loaded, is_connected=is_connected)
    of_target = least.windowed
    is_own = of_target is not None and least.num_pages >= least_whole.num_pages
    if of_target is not None and is_connected and plan.topology.is_rank0:
        said = f"pages of their own, for {plan.scheduling.num_slots} sequences at a time"
        if not is_own:
            said = (
                f"the pages of all layers: their own, for {plan.scheduling.num_slots} sequences at a time, "
                f"would leave {least.num_pages} pages to the others, which have {least_whole.num_pages}"
            )
        logger.info("layers with windows of up to %d tokens have %s", of_target.window, said)
    chosen, least = (windowed, least) if is_own else (whole, least_whole)
    if is_connected:
        logger.info("%s", chosen)
    if least.num_pages < plan.limits.pages_per_seq:
        raise UserError(refusal(plan.config, plan.limits, least))
    return chosen, least


def _connect(plan: ReplicaPlan, loaded: LoadedModels, activity: Activity) -> None:
    """Let NCCL take the memory of all that its ranks will send, so that it is measured with the rest."""
    topology, target = plan.topology, loaded.target
    activity.begin("connecting the GPUs")
    if target is not None and loaded.group is not None:
        num_tokens = plan.scheduling.max_num_batched_tokens
        hidden_size = plan.models.target.config.get_text_config().hidden_size
        connect_target(
            loaded.group, torch.zeros(num_tokens, hidden_size, dtype=target.dtype, device=topology.device)
        )
    if topology.has_draft_rank and topology.rank in (RANK_ZERO, topology.draft_rank):
        connect_draft(topology.draft_rank, torch.zeros(plan.models.vocab_size, device=topology.device))
    activity.begin("sizing the cache")


def connect_target(group: dist.ProcessGroup, largest_TH: Tensor) -> None:
    """Make every collective of a target's ranks once, so that NCCL takes the memory of each: it connects the
    ranks anew for each algorithm, which it chooses by the length."""
    collectives, num_tokens = Collectives(group), len(largest_TH)
    while num_tokens:
        dist.all_reduce(largest_TH[:num_tokens], group=group)
        num_tokens //= 2
    for collective in (collectives.gather, collectives.gather_everywhere, collectives.from_rank0):
        collective(largest_TH[0])


def connect_draft(draft_rank: int, row_V: Tensor) -> None:
    """Send a distribution to the draft's rank, as in a round; both ranks call it."""
    if dist.get_rank() == RANK_ZERO:
        dist.send(row_V, draft_rank)
    else:
        dist.recv(row_V, RANK_ZERO)


class Replica:
    """This rank's part of a replica: made by :func:`build_replica`, on all ranks at the same time."""

    def __init__(
        self,
        plan: ReplicaPlan,
        loaded: LoadedModels,
        room: CacheRoom,
        frozen_costs: CostModel | None,
        agree: Agree | None,
        activity: Activity,
    ) -> None:
        plan = dataclasses.replace(plan, most_draft_tokens=plan.scheduling.max_draft_tokens)
        self._plan, self._loaded, self._room, self._activity = plan, loaded, room, activity
        self.costs: CostModel | None = None
        self._known_costs: dict[SamplingSettings, CostModel] = {}
        if plan.needs_costs:
            self.use_costs(frozen_costs, agree)
        else:
            self._rounds = plan.rounds(None)

    def resample(self, config: GenerateConfig, constraints: RunConstraints) -> None:
        """Generate with these options from now on, with the loaded models and their caches. Only settings of
        sampling, constraints, the seed and the length of completions may differ."""
        models = dataclasses.replace(self._plan.models, constraints=constraints)
        self._plan = dataclasses.replace(self._plan, config=config, models=models)
        if self._plan.needs_costs:
            self.use_costs(self._known_costs.get(self.settings))
        else:
            self._rounds = self._plan.rounds(None)

    def use_costs(self, costs: CostModel | None = None, agree: Agree | None = None) -> CostModel:
        """Decide, between two engines and on all ranks at the same time, by rank 0's ``costs`` from now on;
        where it gives None, by new measurements, which are given to ``agree``, as in
        :func:`build_replica`."""
        topology = self._plan.topology
        found: CostModel | None = broadcast_from_rank0(topology, costs)
        if found is None:
            found = self._measure()
            if topology.is_rank0 and agree is not None:
                found = agree(found)
            found = broadcast_from_rank0(topology, found)
            self._activity.begin("generating", has_progress=True)
        assert found is not None
        self.costs, self._rounds = found, self._plan.rounds(found)
        self._known_costs[self.settings] = found
        return found

    def _measure(self) -> CostModel:
        plan, loaded = self._plan, self._loaded
        costs = measure_costs(
            plan.assembly(self._room),
            plan.topology,
            plan.workload,
            target=loaded.target,
            draft=loaded.draft,
            group=loaded.group,
            num_branch_slots=plan.limits.num_branch_slots,
            uses_features=plan.config.is_traced or uses_features(plan.config.policy),
            begin=self._activity.begin,
        )
        if plan.topology.world_size > 1 or loaded.target is None or loaded.draft is None:
            return costs
        self._activity.begin("rehearsing rounds")
        assembly = plan.assembly(self._room, plan.rounds(costs))
        return rehearsed_costs(costs, assembly, loaded.target, loaded.draft, plan.workload, plan.config)

    @property
    def advice(self) -> str | None:
        """A warning about where the draft is."""
        return self._plan.advice(self.costs)

    @property
    def settings(self) -> SamplingSettings:
        return self._plan.settings

    @property
    def ahead(self) -> RoundShape:
        """What the draft does while the target verifies, at most."""
        return self._rounds.ahead

    @property
    def num_pages(self) -> int:
        """The number of pages of the table that both models' caches follow."""
        return self._room.num_pages

    @property
    def num_slots(self) -> int:
        """Most sequences that run at a time."""
        return self._rounds.scheduling.num_slots

    @property
    def draft_runner(self) -> ModelRunner:
        """The draft, on the rank that holds it."""
        assert self._loaded.draft is not None
        return self._loaded.draft

    @property
    def loading_check(self) -> LoadingCheck:
        """The result, on rank 0, of comparing the loaded target with its files."""
        assert self._loaded.check is not None
        return self._loaded.check

    @property
    def choices(self) -> dict[str, Any]:
        """How a target on GPUs sums over them and multiplies, by the names in a manifest."""
        found = {} if self._loaded.target is None else vars(self._loaded.target.model)
        choices = {PRODUCTS: found[PRODUCTS]} if PRODUCTS in found else {}
        return choices | ({SUMS: found[SUMMING].choice} if SUMMING in found else {})

    def serve(self) -> None:
        """The loop of all ranks except rank 0."""
        topology = self._plan.topology
        if topology.holds_target:
            assert self._loaded.target is not None and self._loaded.group is not None
            self.assembly().serve_target(self._loaded.target, self._loaded.group)
        else:
            self.assembly().serve_draft(self.draft_runner, self._rounds.policy)

    def engine(self, requests: Requests, stop_rules: StopRules, stats_recorder: StatsRecorder) -> Engine:
        """Rank 0's engine over these requests."""
        return self.assembly(stop_rules).engine(
            requests,
            target=self.rank0_target(),
            proposer=self._proposer(),
            stats_recorder=stats_recorder,
            on_lone_row=remember_lone_row,
        )

    def assembly(self, stop_rules: StopRules | None = None) -> Assembly:
        """The assembly of this rank's models. ``stop_rules``: by default the target's stop tokens."""
        return self._plan.assembly(self._room, self._rounds, stop_rules)

    def draft_engine(self, requests: Requests, stop_rules: StopRules) -> Engine:
        """An engine that generates with the draft alone, on the rank that holds it."""
        scheduling = dataclasses.replace(
            self._rounds.scheduling, max_num_seqs=self.num_slots, max_draft_tokens=0, num_ahead_tokens=0
        )
        assembly = dataclasses.replace(
            self.assembly(stop_rules),
            scheduling=scheduling,
            windowed=None,
            is_traced=False,
            trusts_draft=False,
        )
        return assembly.engine(
            requests,
            target=assembly.local_target(self.draft_runner),
            proposer=Draft(),
            stats_recorder=StatsRecorder(),
        )

    def rank0_target(self) -> Target:
        """The target on rank 0; the other target ranks follow its passes in :meth:`serve`."""
        target, group = self._loaded.target, self._loaded.group
        assert target is not None
        assembly = self.assembly()
        return assembly.local_target(target) if group is None else assembly.sharded_target(target, group)

    def _proposer(self) -> Proposer:
        topology, assembly, target = self._plan.topology, self.assembly(), self._loaded.target
        if self._plan.config.uses_ngrams:
            return assembly.ngram_draft(self.costs)
        if not topology.uses_draft:
            return Draft()
        if topology.is_colocated:
            return assembly.local_draft(self.draft_runner, self._rounds.policy, target=target)
        return assembly.draft(ToRank(topology.draft_rank, topology.device), target)
