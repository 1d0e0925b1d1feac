"""The hidden states that an EAGLE-3 draft reads, as they leave a target's layers.

T flat tokens, N tokens whose logits are wanted, E hidden size, S numbers of three states, side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.loading.reference import find_layers
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import Acceleration, ModelRunner


class StatesRunner(ModelRunner):
    """A target whose passes leave the hidden states before some layers.

    A hook at each of these layers gets them for every family, sharded or not: they are whole on every rank.
    It needs transformers' own layers, and passes that are not recorded.

    Attributes:
        last: the last pass's tokens and their states [T, S]; None if it has failed, or was taken.
    """

    last: tuple[FlatBatch, Tensor] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        layers: Sequence[int],
        on_pass: Callable[[], None] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``group``: the ranks that share the model; None for a whole model."""
        self._layers = [find_layers(model)[2][layer] for layer in layers]
        acceleration = dataclasses.replace(
            Acceleration.of(device, group), is_static=False, is_fused=False, is_compiled=False
        )
        super().__init__(model, device, acceleration, model_impl="transformers", on_pass=on_pass)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        self.last = None
        states: list[Tensor] = []

        def catch(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            del layer
            # Of a batch that is one row for the model. Later layers may add to it in place.
            states.append(inputs[0][0].clone())

        hooks = [layer.register_forward_pre_hook(catch) for layer in self._layers]
        try:
            logits_NV = super().forward(batch, logits_index)
        finally:
            for hook in hooks:
                hook.remove()
        self.last = batch, torch.cat(states, dim=-1)
        return logits_NV
