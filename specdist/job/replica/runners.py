"""The models of a rank with their caches: drafts that read the target's states need others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.engine.interfaces import Proposer
from specdist.engine.stateful_draft import StatefulDraft
from specdist.job.replica.model_plan import ModelPlan
from specdist.models.eagle.eagle import state_layers
from specdist.models.eagle.eagle_loading import load_eagle
from specdist.models.eagle.eagle_runner import EagleRunner
from specdist.models.eagle.states import StatesRunner
from specdist.models.files.checkpoint import Checkpoint
from specdist.models.files.weight_stream import Reading
from specdist.models.loading.loading import load_whole
from specdist.models.passes.runner import Acceleration, ModelRunner


def target_runner(
    config: GenerateConfig,
    models: ModelPlan,
    model: torch.nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None,
    on_pass: Callable[[], None],
) -> ModelRunner:
    """The loaded target, or a rank's shard of it. ``group``: the ranks that share it."""
    if models.draft is None or not models.draft.is_eagle:
        acceleration = Acceleration.of(device, group)
        return ModelRunner(model, device, acceleration, model_impl=config.model_impl, on_pass=on_pass)
    num_layers = models.target.config.get_text_config().num_hidden_layers
    layers = state_layers(models.draft.config, num_layers)
    return StatesRunner(model, device, layers, on_pass, group)


def load_draft_runner(
    config: GenerateConfig,
    models: ModelPlan,
    files: Checkpoint,
    device: torch.device,
    reading: Reading,
    on_pass: Callable[[], None],
) -> ModelRunner:
    """The draft, read from these files."""
    dtype = files.torch_dtype(config.dtype)
    if files.is_eagle:
        return EagleRunner(load_eagle(files, models.target, dtype=dtype, device=device), device, on_pass)
    model = load_whole(files, dtype=dtype, device=device, reading=reading)
    head = models.head.network if models.head else None
    return ModelRunner(model, device, model_impl=config.model_impl, head=head, on_pass=on_pass)


def with_states(draft: Proposer, target: ModelRunner | None) -> Proposer:
    """On rank 0: a draft that gets the target's states, if it reads them."""
    return StatefulDraft(draft, target) if isinstance(target, StatesRunner) else draft
