"""The models that a rank of a replica holds: loaded, and the target compared with its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.job.models.model_plan import ModelPlan
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.logs import quiet_libraries
from specdist.job.ranks.topology import Topology, gathered, init_deepspeed
from specdist.models.draft_models.declaration import Placement
from specdist.models.drafters.runner import load_drafter
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.loading.loading import load_sharded, load_whole
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.sharding.cutting import join_sharding
from specdist.models.start_check.loading_check import LoadingCheck, check_loading
from specdist.utils.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class LoadedModels:
    """The models of one rank.

    Attributes:
        target, draft: None on a rank that does not hold them.
        group: the ranks that share the target, if there are several.
        check: on rank 0 the result of the comparison.
    """

    target: ModelRunner | None
    draft: ModelRunner | None
    group: dist.ProcessGroup | None
    check: LoadingCheck | None

    @property
    def runners(self) -> list[ModelRunner]:
        return [runner for runner in (self.target, self.draft) if runner is not None]


def load_models(
    config: GenerateConfig, models: ModelPlan, topology: Topology, activity: Activity
) -> LoadedModels:
    """This rank's models. All ranks call it at the same time; an error of one is raised on all of them."""
    with quiet_libraries(activity.step):
        loading = _Loading(config, models, topology, activity)
        group, target, draft = run_on_all_ranks(topology, activity, loading.load)
        compare = partial(loading.compare, target, group)
        check = run_on_all_ranks(topology, activity, compare)
    return LoadedModels(target=target, draft=draft, group=group, check=check)


def run_on_all_ranks(topology: Topology, activity: Activity, step: Callable[[], Value]) -> Value:
    """Run a step on every rank; raise the first :class:`UserError` of any rank on all of them."""
    message: str | None = None
    found: list[Value] = []
    try:
        found.append(step())
    except UserError as error:
        message = str(error)
    activity.begin("waiting until every rank has loaded")
    for other in gathered(topology, message):
        if other is not None:
            raise UserError(other)
    return found[0]


@dataclass(frozen=True)
class _Loading:
    config: GenerateConfig
    models: ModelPlan
    topology: Topology
    activity: Activity

    def load(self) -> tuple[dist.ProcessGroup | None, ModelRunner | None, ModelRunner | None]:
        """The ranks that share the target, the target, and the draft."""
        topology, group, target, draft = self.topology, None, None, None
        if topology.world_size > 1 and topology.tp_size > 1:
            self.activity.begin("joining DeepSpeed")
            init_deepspeed(topology)
            # NCCL_GRAPH_MIXING_SUPPORT=0 would spare recorded sums some microseconds, but then no call may
            # follow a graph that still runs, "regardless of stream ordering" (NCCL's manual). Logits are
            # gathered by such a call: the recorded pass that computes them is still under way.
            group = dist.new_group(list(range(topology.tp_size)), timeout=topology.collective_timeout)
        if topology.holds_target:
            self.activity.begin("loading the target")
            target = self._target(group)
        elif topology.tp_size > 1 and topology.world_size > 1:
            self.activity.begin("waiting for the target to be sharded")
            join_sharding()
        if self.models.draft is not None and topology.holds_draft:
            self.activity.begin("loading the draft")
            draft = self._draft(self.models.draft, target)
        return group, target, draft

    def compare(self, target: ModelRunner | None, group: dist.ProcessGroup | None) -> LoadingCheck | None:
        """Compare the target with its files. The draft needs no check: the target verifies its tokens."""
        if target is None:
            return None
        self.activity.begin("checking the loaded models")
        return check_loading(
            target.model,
            self.models.target,
            dtype=target.dtype,
            device=self.topology.device,
            vocab_size=self.models.vocab_size,
            group=group,
        )

    def _target(self, group: dist.ProcessGroup | None) -> ModelRunner:
        device, on_step = self.topology.device, self.activity.step
        files, draft = self.models.target, self.models.draft
        dtype = files.torch_dtype(self.config.dtype)
        if group is None:
            model = load_whole(files, dtype=dtype, device=device, on_tensor=on_step)
        else:
            model = load_sharded(
                files,
                dtype=dtype,
                device=device,
                group=group,
                vocab_size=self.models.vocab_size,
                is_expert_parallel=self.models.is_expert_parallel,
                sums=self.models.sums,
                on_tensor=on_step,
            )
        acceleration = Acceleration.of(
            device, group, has_float8_cache=files.has_float8_cache, products=self.models.products
        )
        reads = None
        if draft is not None and draft.drafter is not None:
            num_layers = files.config.get_text_config().num_hidden_layers
            reads = draft.drafter.read_states(draft.config, num_layers)
        return ModelRunner(
            model, device, acceleration, model_impl=self.config.model_impl, reads=reads, on_pass=on_step
        )

    def _draft(self, files: Checkpoint, target: ModelRunner | None) -> ModelRunner:
        device, on_step, head = self.topology.device, self.activity.step, self.models.head
        dtype = files.torch_dtype(self.config.dtype)
        if files.drafter is not None:
            placement = Placement(dtype, device, on_step, None if target is None else target.model)
            return load_drafter(files, self.models.target, placement, on_step)
        return ModelRunner(
            load_whole(files, dtype=dtype, device=device, on_tensor=on_step),
            device,
            Acceleration.of(device, has_float8_cache=files.has_float8_cache),
            model_impl=self.config.model_impl,
            head=head.network if head else None,
            on_pass=on_step,
        )
