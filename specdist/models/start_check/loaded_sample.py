"""The sample of :mod:`specdist.models.start_check.reference` in the loaded model: its own attention, over a
real cache.

T tokens, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.models.attention import probe
from specdist.models.attention.attention import AttentionCall, LayerAttention
from specdist.models.batch.flat import FlatBatch, model_positions
from specdist.models.cache.pages import PageUpdates
from specdist.models.families.adapters import is_paged_by_registry
from specdist.models.passes import fusing
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.hidden import find_layers
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.torch_pass import TorchPass
from specdist.models.recurrent.mixers import Mixer
from specdist.models.start_check.reference import LAYER_NUMBERS, Sample

PAGE_SIZE = 16
# What these say that a runner uses, the one of the run says again.
SAID_AGAIN = tuple(logging.getLogger(module.__name__) for module in (fusing, probe))


def run_loaded(model: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Tensor]:
    """The same as :func:`specdist.models.start_check.reference.run_reference`, of this rank's heads and
    vocabulary. Compiled code and kept latents have checks of their own against the layers that run here.

    Raises NotImplementedError if the model's layers are not in one list.
    """
    # Recorded passes are compared with unrecorded ones when they are recorded; rounded keys are right.
    best = Acceleration.of(device)
    acceleration = Acceleration(kernels=best.kernels, is_fused=best.is_fused, keeps_latents=False)
    experts = contextlib.nullcontext() if sample.experts is None else sample.experts.alone(model)
    with _only_layers(model, sample), experts, _unsaid():
        runner = ModelRunner(model, device, acceleration, model_impl="transformers", make_pass=_RecordingPass)
        logits_TV, found = _run(runner, sample), dict[str, Tensor]()
        if is_paged_by_registry(model):  # of other models the reference cannot tell them
            assert isinstance(runner.torch_pass, _RecordingPass)
            found = {
                f"layer {sample.layers[layer]} {what}": tensor
                for (layer, what), tensor in runner.torch_pass.recorded.items()
            }
    return {**found, "logits": logits_TV}


def _run(runner: ModelRunner, sample: Sample) -> Tensor:
    """Logits [T, V] of all tokens, float32 on the CPU."""
    num_tokens = len(sample.positions)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner.allocate(num_pages=num_pages, page_size=PAGE_SIZE, num_slots=1, max_seq_len=num_tokens)
    slots_T = np.zeros(num_tokens, np.int64)
    if runner.rope_border is not None:
        lengths = np.array([sample.positions[-1] + 1])
        runner.update_pages(PageUpdates.of_rope_lengths(slots_T[:1], lengths))
    own = model_positions(slots_T, np.array(sample.positions), runner.pages, runner.rope_border)
    batch = FlatBatch(sample.token_ids, slots_T, np.arange(num_tokens), position_ids_T=own)
    # Not in order, as pages are in a run.
    pages_1P = np.arange(num_pages, dtype=np.int32)[None, ::-1].copy()
    return runner.forward_over(batch, pages_1P, np.arange(num_tokens)).float().cpu()


class _RecordingPass(TorchPass):
    """Records the inputs of each layer's attention, by layer and name: [T, H * D]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: dict[tuple[int, str], Tensor] = {}

    def attention(self, batch: FlatBatch, pages_SP: np.ndarray) -> LayerAttention:
        return _Recording(super().attention(batch, pages_SP), self.recorded)


@dataclasses.dataclass
class _Recording:
    attention: Any
    recorded: dict[tuple[int, str], Tensor]

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        for name, tensor in zip(("queries", "keys", "values"), call[:3], strict=True):
            self.recorded[layer, name] = tensor.flatten(1).float().cpu()
        found: Tensor = self.attention.attend(layer, call)
        return found

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        found: Tensor = self.attention.mix(mixer, rows_TR)
        return found


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """A context in which these say no more than warnings."""
    levels = [logger.level for logger in SAID_AGAIN]
    try:
        for logger in SAID_AGAIN:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(SAID_AGAIN, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _only_layers(model: PreTrainedModel, sample: Sample) -> Iterator[None]:
    """A context in which the model has only the sample's layers, with numbers of their own."""
    config = model.config.get_text_config()
    owner, leaf, stack = find_layers(model)
    changed = sample.changes(config)
    undo: list[Callable[[], None]] = [lambda: setattr(owner, leaf, stack)]

    def change(each: Any, name: str, value: Any) -> None:
        before = getattr(each, name)
        undo.append(lambda: setattr(each, name, before))
        setattr(each, name, value)

    try:
        kept = torch.nn.ModuleList(stack[layer] for layer in sample.layers)
        setattr(owner, leaf, kept)
        for number, layer in enumerate(kept):
            for module in layer.modules():
                for name in LAYER_NUMBERS:
                    if isinstance(vars(module).get(name), int):
                        change(module, name, number)
        for name, value in changed.items():
            change(config, name, value)
        yield
    finally:
        for each in reversed(undo):
            each()
