"""The hidden states that a drafter reads, as they leave a target's layers.

T flat tokens, N tokens whose logits are wanted, S numbers of the states that are read, side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.drafters.declaration import ReadStates
from specdist.models.loading.reference import find_layers
from specdist.models.passes.flat import FlatBatch
from specdist.models.passes.runner import Acceleration, ModelRunner


class StatesRunner(ModelRunner):
    """A target whose passes leave hidden states of some layers.

    Hooks get them for every family, sharded or not: they are whole on every rank.
    It needs transformers' own layers, and passes that are not recorded.

    Attributes:
        last: the last pass's tokens and their states [T, S]; None if it has failed, or was taken.
    """

    last: tuple[FlatBatch, Tensor] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        read: ReadStates,
        acceleration: Acceleration | None = None,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        """``acceleration``: what another model could use; by default, of a whole one."""
        stack = list(find_layers(model)[2])
        # What leaves the last one has no layer that it goes into.
        self._layers = [stack[layer] for layer in read.before if layer < len(stack)]
        self._leaving = stack[-1:] if len(stack) in read.before else []
        if read.has_final:
            self._leaving.append(model.get_decoder() if hasattr(model, "get_decoder") else model.base_model)
        acceleration = dataclasses.replace(
            acceleration or Acceleration.of(device), is_static=False, is_fused=False, is_compiled=False
        )
        super().__init__(model, device, acceleration, model_impl="transformers", on_pass=on_pass)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        self.last = None
        states: list[Tensor] = []

        def catch(layer: nn.Module, inputs: tuple[Any, ...], outputs: Any = None) -> None:
            del layer
            found = inputs if outputs is None else outputs
            # Of a batch that is one row for the model. Later layers may add to it in place.
            states.append((found if isinstance(found, Tensor) else found[0])[0].clone())

        hooks = [layer.register_forward_pre_hook(catch) for layer in self._layers]
        hooks += [layer.register_forward_hook(catch) for layer in self._leaving]
        try:
            logits_NV = super().forward(batch, logits_index)
        finally:
            for hook in hooks:
                hook.remove()
        self.last = batch, torch.cat(states, dim=-1)
        return logits_NV
