"""The models that a rank of a replica holds: loaded, and the target compared with its files."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.logs import quiet_libraries
from specdist.job.ranks.topology import Topology, gathered, init_deepspeed
from specdist.job.replica.model_plan import ModelPlan
from specdist.job.replica.runners import load_draft_runner, target_runner
from specdist.job.replica.weights import staged_weights
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.weight_stream import Reading
from specdist.models.loading.cutting import join_sharding
from specdist.models.loading.loading import load_sharded, load_whole
from specdist.models.loading.loading_check import LoadingCheck, check_loading
from specdist.models.passes.runner import ModelRunner
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.errors import UserError


class LoadedModels:
    """Loads this rank's models. All ranks construct it at the same time.

    Attributes:
        target, draft: None on a rank that does not hold them.
        group: the ranks that share the target, if there are several.
        check: on rank 0 the result of the comparison.
        num_weight_bytes: read by all ranks together.
    """

    def __init__(
        self,
        config: GenerateConfig,
        models: ModelPlan,
        topology: Topology,
        settings: SamplingSettings,
        activity: Activity,
    ) -> None:
        self._config = config
        self._models = models
        self._topology = topology
        self._settings = settings
        self._activity = activity
        self._reading = Reading(on_tensor=activity.step)
        self.target: ModelRunner | None = None
        self.draft: ModelRunner | None = None
        self.group: dist.ProcessGroup | None = None
        self.check: LoadingCheck | None = None
        with quiet_libraries(activity.step):
            self._together(self._load)
            self.num_weight_bytes = sum(gathered(topology, self._reading.num_bytes))
            self._together(self._compare)

    def _together(self, step: Callable[[], None]) -> None:
        """Run a step on every rank; raise the first :class:`UserError` of any rank on all of them."""
        message: str | None = None
        try:
            step()
        except UserError as error:
            message = str(error)
        self._activity.begin("waiting until every rank has loaded")
        for found in gathered(self._topology, message):
            if found is not None:
                raise UserError(found)

    def _load(self) -> None:
        topology = self._topology
        if topology.world_size > 1 and topology.tp_size > 1:
            self._activity.begin("joining DeepSpeed")
            init_deepspeed(topology)
            # NCCL_GRAPH_MIXING_SUPPORT=0 would spare recorded sums some microseconds, but then no call may
            # follow a graph that still runs, "regardless of stream ordering" (NCCL's manual). Logits are
            # gathered by such a call: the recorded pass that computes them is still under way.
            self.group = dist.new_group(list(range(topology.tp_size)), timeout=topology.collective_timeout)
        if topology.holds_target:
            self._activity.begin("loading the target")
            with staged_weights(self._config, self._models.target, self._activity.step) as target:
                self.target = target_runner(
                    self._config,
                    self._models,
                    self._load_target(target),
                    topology.device,
                    self.group,
                    self._activity.step,
                )
        elif topology.tp_size > 1 and topology.world_size > 1:
            self._activity.begin("waiting for the target to be sharded")
            join_sharding()
        draft = self._models.draft
        if draft is not None and topology.holds_draft:
            self._activity.begin("loading the draft")
            with staged_weights(self._config, draft, self._activity.step) as files:
                self.draft = load_draft_runner(
                    self._config, self._models, files, topology.device, self._reading, self._activity.step
                )

    def _compare(self) -> None:
        """Compare the target with its files. The draft needs no check: the target verifies its tokens."""
        if self.target is None:
            return
        self._activity.begin("checking the loaded models")
        self.check = check_loading(
            self.target.model,
            self._models.target,
            dtype=self.target.dtype,
            device=self._topology.device,
            vocab_size=self._models.vocab_size,
            group=self.group,
            model_impl=self._config.model_impl,
        )

    def _load_target(self, target: Checkpoint) -> torch.nn.Module:
        device = self._topology.device
        if self.group is None:
            return load_whole(target, dtype=self._dtype(target), device=device, reading=self._reading)
        return load_sharded(
            target,
            dtype=self._dtype(target),
            device=device,
            group=self.group,
            vocab_size=self._models.vocab_size,
            reading=self._reading,
        )

    def _dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        return checkpoint.torch_dtype(self._config.dtype)
