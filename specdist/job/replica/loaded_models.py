"""The models that a rank of a replica holds: loaded, and the target compared with its files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.logs import quiet_libraries
from specdist.job.ranks.topology import Topology, gathered, init_deepspeed
from specdist.job.replica.model_plan import ModelPlan
from specdist.models.drafters.declaration import Placement
from specdist.models.drafters.drafters import load_drafter
from specdist.models.drafters.states import StatesRunner
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.staged_files import staged
from specdist.models.files.weight_stream import Reading
from specdist.models.loading.cutting import join_sharding
from specdist.models.loading.loading import load_sharded, load_whole
from specdist.models.loading.loading_check import LoadingCheck, check_loading
from specdist.models.passes.runner import Acceleration, ModelRunner
from specdist.utils.errors import UserError
from specdist.utils.host import process_start_s

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class LoadedModels:
    """The models of one rank.

    Attributes:
        target, draft: None on a rank that does not hold them.
        group: the ranks that share the target, if there are several.
        check: on rank 0 the result of the comparison.
        num_weight_bytes: read by all ranks together.
    """

    target: ModelRunner | None
    draft: ModelRunner | None
    group: dist.ProcessGroup | None
    check: LoadingCheck | None
    num_weight_bytes: int

    @property
    def runners(self) -> list[ModelRunner]:
        return [runner for runner in (self.target, self.draft) if runner is not None]


def load_models(
    config: GenerateConfig, models: ModelPlan, topology: Topology, activity: Activity
) -> LoadedModels:
    """This rank's models. All ranks call it at the same time; an error of one is raised on all of them."""
    reading = Reading(on_tensor=activity.step)
    with quiet_libraries(activity.step):
        loading = _Loading(config, models, topology, activity, reading)
        group, target, draft = _together(topology, activity, loading.load)
        num_weight_bytes = sum(gathered(topology, reading.num_bytes))
        compare = partial(loading.compare, target, group)
        check = _together(topology, activity, compare)
    return LoadedModels(
        target=target, draft=draft, group=group, check=check, num_weight_bytes=num_weight_bytes
    )


def _together(topology: Topology, activity: Activity, step: Callable[[], Value]) -> Value:
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
    reading: Reading

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
            with self._staged(self.models.target) as files:
                target = self._target(files, group)
        elif topology.tp_size > 1 and topology.world_size > 1:
            self.activity.begin("waiting for the target to be sharded")
            join_sharding()
        if self.models.draft is not None and topology.holds_draft:
            self.activity.begin("loading the draft")
            with self._staged(self.models.draft) as files:
                draft = self._draft(files, target)
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
            model_impl=self.config.model_impl,
        )

    def _target(self, files: Checkpoint, group: dist.ProcessGroup | None) -> ModelRunner:
        device, on_pass, draft = self.topology.device, self.activity.step, self.models.draft
        dtype = files.torch_dtype(self.config.dtype)
        if group is None:
            model = load_whole(files, dtype=dtype, device=device, reading=self.reading)
        else:
            model = load_sharded(
                files,
                dtype=dtype,
                device=device,
                group=group,
                vocab_size=self.models.vocab_size,
                is_expert_parallel=self.models.is_expert_parallel,
                sums=self.models.sums,
                reading=self.reading,
            )
        acceleration = Acceleration.of(device, group, has_float8_cache=files.has_float8_cache)
        if draft is None or draft.drafter is None:
            return ModelRunner(
                model, device, acceleration, model_impl=self.config.model_impl, on_pass=on_pass
            )
        num_layers = self.models.target.config.get_text_config().num_hidden_layers
        read = draft.drafter.read_states(draft.config, num_layers)
        return StatesRunner(model, device, read, acceleration, on_pass)

    def _draft(self, files: Checkpoint, target: ModelRunner | None) -> ModelRunner:
        device, on_pass, head = self.topology.device, self.activity.step, self.models.head
        dtype = files.torch_dtype(self.config.dtype)
        if files.drafter is not None:
            placement = Placement(dtype, device, self.reading, None if target is None else target.model)
            return load_drafter(files, self.models.target, placement, on_pass)
        return ModelRunner(
            load_whole(files, dtype=dtype, device=device, reading=self.reading),
            device,
            Acceleration.of(device, has_float8_cache=files.has_float8_cache),
            model_impl=self.config.model_impl,
            head=head.network if head else None,
            on_pass=on_pass,
        )

    def _staged(self, checkpoint: Checkpoint) -> AbstractContextManager[Checkpoint]:
        """The checkpoint with its files in ``--stage_weights``, or itself without that option."""
        folder = self.config.stage_weights
        return staged(
            checkpoint,
            None if folder is None else Path(folder),
            limit_bytes=self.config.stage_limit_bytes,
            checked_since=process_start_s(),
            on_step=self.activity.step,
        )
