"""The hidden states that a drafter reads, as they leave a target's layers.

T flat tokens, N tokens whose logits are wanted, S numbers of the states that are read, side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch, PassOutputs
from specdist.models.draft_models.declaration import ReadStates
from specdist.models.passes.acceleration import Acceleration
from specdist.models.passes.runner import ModelRunner
from specdist.models.passes.static import MAX_TOKENS
from specdist.models.passes.torch_pass import TorchPass
from specdist.models.start_check.reference import find_layers


class StatesPass(TorchPass):
    """Its states are written where every pass writes them, so that it can be recorded."""

    _layers: Sequence[nn.Module] = ()
    _leaving: Sequence[nn.Module] = ()
    _short_TS: Tensor | None = None
    _long_TS: Tensor | None = None

    def read(self, layers: Sequence[nn.Module], leaving: Sequence[nn.Module]) -> None:
        """From now on, what goes into these layers and what leaves those, side by side."""
        self._layers, self._leaving = layers, leaving
        self._short_TS = self._memory(MAX_TOKENS)

    def left_states(self, num_tokens: int) -> Tensor:
        """[T, S]: of the last pass, which had so many tokens, until the next one."""
        found = self._short_TS if num_tokens <= MAX_TOKENS else self._long_TS
        assert found is not None
        return found[:num_tokens]

    def _memory(self, num_tokens: int) -> Tensor:
        weight = self._model.get_input_embeddings().weight
        num_read = len(self._layers) + len(self._leaving)
        return weight.new_empty(num_tokens, num_read * self._model.config.get_text_config().hidden_size)

    @torch.inference_mode()
    def compute(self, token_ids_T: Tensor, *inputs: Any, with_hidden: bool = False) -> PassOutputs:
        if len(token_ids_T) > MAX_TOKENS:
            self._long_TS = self._memory(len(token_ids_T))
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_pre_hook(partial(self._catch, place)).remove)
            for place, layer in enumerate(self._leaving, len(self._layers)):
                stack.callback(layer.register_forward_hook(partial(self._catch, place)).remove)
            return super().compute(token_ids_T, *inputs, with_hidden=with_hidden)

    def _catch(self, place: int, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any = None) -> None:
        del layer
        found = inputs if outputs is None else outputs
        # Of a batch that is one row for the model. Later layers may add to it in place.
        states_TE = (found if isinstance(found, Tensor) else found[0])[0]
        num_tokens, size = states_TE.shape
        self.left_states(num_tokens)[:, place * size : (place + 1) * size].copy_(states_TE)


class StatesRunner(ModelRunner):
    """A target whose passes leave hidden states of some layers.

    Hooks get them for every family, sharded or not: they are whole on every rank. It needs transformers' own
    layers, and not compiled code.

    Attributes:
        last: the last pass's tokens and their states [T, S]; None if it has failed, or was taken.
    """

    pass_class = StatesPass
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
        acceleration = dataclasses.replace(acceleration or Acceleration.of(device), is_compiled=False)
        super().__init__(model, device, acceleration, model_impl="transformers", on_pass=on_pass)
        stack = list(find_layers(model)[2])
        # What leaves the last one has no layer that it goes into.
        layers = [stack[layer] for layer in sorted(read.before) if layer < len(stack)]
        leaving = stack[-1:] if len(stack) in read.before else []
        if read.has_final:
            leaving.append(model.get_decoder() if hasattr(model, "get_decoder") else model.base_model)
        assert isinstance(self.torch_pass, StatesPass)
        self.torch_pass.read(layers, leaving)

    def forward(self, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
        self.last = None
        logits_NV = super().forward(batch, logits_index)
        assert isinstance(self.torch_pass, StatesPass)
        self.last = batch, self.torch_pass.left_states(len(batch))
        return logits_NV
