"""A model's hidden states, and what reads them: trained heads the last ones, drafters those of some layers.

The last ones are the inputs of the output head, after the final norm, at the tokens whose logits are wanted.
Hooks get all of them for every family, without model code.

N tokens whose logits are wanted, H hidden size, T flat tokens, S numbers of the states that are read, side by
side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.models.batch.flat import FlatBatch, PassOutputs
from specdist.models.draft_models.declaration import ReadStates
from specdist.models.passes.static import MAX_TOKENS

# Estimates are at least so far from 0 and 1 where a logit is taken of them.
LEAST_ESTIMATE = 1e-15


class HiddenStateHead(nn.Module):
    """A trained head that a runner runs with its passes: from last hidden states [N, H] and, if it
    ``uses_features``, three features [3, N] of the same tokens, to a logit for each [N]."""

    @property
    def uses_features(self) -> bool:
        return False

    @property
    def reads_drawing_state(self) -> bool:
        """It reads the hidden state that a token was drawn from, and not the one with the token as input. A
        pass gives its logits without the features, :meth:`logits_of_draws` the rest."""
        return False

    @property
    def takes_features(self) -> bool:
        """Whether a pass needs the features of its tokens."""
        return self.uses_features and not self.reads_drawing_state

    def logits_of_draws(self, features_3N: Tensor) -> Tensor:
        """[N]: what the features of the drawn tokens add, for a head that reads the drawing state."""
        return torch.zeros(features_3N.shape[1], device=features_3N.device)

    @torch.inference_mode()
    def estimates_of_draws(self, estimates_N: Tensor, features_3N: Tensor) -> Tensor:
        """float64 [N] in [0, 1]: a pass's estimates, of a head that reads the drawing state, for the tokens
        with these features that were then drawn."""
        added_N = self.logits_of_draws(features_3N).double()
        return (torch.logit(estimates_N, eps=LEAST_ESTIMATE) + added_N).sigmoid()

    @torch.inference_mode()
    def with_logits(self, outputs: PassOutputs, features_3N: Tensor | None) -> Tensor:
        """[N, V + 1]: a pass's logits, and in the last column the head's. One tensor, so that a recorded pass
        includes the head. Without the features that it takes, that column is meaningless."""
        logits_NV, hidden_NH = outputs
        assert hidden_NH is not None
        if self.takes_features and features_3N is None:
            features_3N = torch.zeros(3, len(logits_NV), device=logits_NV.device)
        own_N = self(hidden_NH, features_3N)
        return torch.cat([logits_NV, own_N.to(logits_NV.dtype)[:, None]], dim=1)

    def estimates_of(self, outputs: Tensor, drawn_features_3N: Tensor | None) -> Tensor:
        """float64 [N]: from a pass's outputs, as of :meth:`with_logits`, the estimates of its tokens; or
        of those drawn after it, if the head reads the drawing state."""
        estimates_N = outputs[:, -1].double().sigmoid()
        if not self.reads_drawing_state:
            return estimates_N
        assert drawn_features_3N is not None
        return self.estimates_of_draws(estimates_N, drawn_features_3N)


class LastHiddenStates:
    """While it is open, ``hidden_NH`` is the output head's last input."""

    hidden_NH: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self._head: nn.Module = model.get_output_embeddings()

    def __enter__(self) -> LastHiddenStates:
        self._hook = self._head.register_forward_pre_hook(self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _catch(self, head: nn.Module, inputs: tuple[Any, ...]) -> None:
        del head
        # A flat batch is one row for the model.
        self.hidden_NH = inputs[0][0]


class StateReader:
    """Hidden states of some of a target's layers, as its passes leave them for a drafter.

    They are whole on every rank, sharded or not. Every pass writes them to the same memory, so that it can be
    recorded. The layers are transformers' own, and not compiled code.

    Attributes:
        last: the last pass's tokens and their states [T, S]; None if it has failed, or was taken.
    """

    last: tuple[FlatBatch, Tensor] | None = None

    def __init__(self, model: PreTrainedModel, read: ReadStates) -> None:
        stack = list(find_layers(model)[2])
        # What leaves the last one has no layer that it goes into.
        self._layers = [stack[layer] for layer in sorted(read.before) if layer < len(stack)]
        self._leaving: list[nn.Module] = stack[-1:] if len(stack) in read.before else []
        if read.has_final:
            self._leaving.append(model.get_decoder() if hasattr(model, "get_decoder") else model.base_model)
        self._model = model
        self._short_TS = self._long_TS = self._memory(MAX_TOKENS)

    def _memory(self, num_tokens: int) -> Tensor:
        weight = self._model.get_input_embeddings().weight
        num_read = len(self._layers) + len(self._leaving)
        return weight.new_empty(num_tokens, num_read * self._model.config.get_text_config().hidden_size)

    @contextlib.contextmanager
    def reading(self, num_tokens: int) -> Iterator[None]:
        """A context in which the model runs a pass over so many tokens."""
        if num_tokens > MAX_TOKENS:
            self._long_TS = self._memory(num_tokens)
        with contextlib.ExitStack() as stack:
            for place, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_pre_hook(partial(self._catch, place)).remove)
            for place, layer in enumerate(self._leaving, len(self._layers)):
                stack.callback(layer.register_forward_hook(partial(self._catch, place)).remove)
            yield

    def keep(self, batch: FlatBatch) -> None:
        """The last pass was over these tokens."""
        self.last = batch, self._left_states(len(batch))

    def _left_states(self, num_tokens: int) -> Tensor:
        """[T, S]: of the last pass, which had so many tokens, until the next one."""
        return (self._short_TS if num_tokens <= MAX_TOKENS else self._long_TS)[:num_tokens]

    def _catch(self, place: int, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any = None) -> None:
        del layer
        found = inputs if outputs is None else outputs
        # The states of a batch that is one row for the model. Later layers may add to it in place.
        states_TE = (found if isinstance(found, Tensor) else found[0])[0]
        num_tokens, size = states_TE.shape
        self._left_states(num_tokens)[:, place * size : (place + 1) * size].copy_(states_TE)


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """The list of decoder layers, the module that holds it, and its name there. Raises
    NotImplementedError."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    num_layers = model.config.get_text_config().num_hidden_layers
    for within in (decoder, model):
        for owner in within.modules():
            for leaf, module in owner.named_children():
                if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                    return owner, leaf, module
    raise NotImplementedError(f"{type(model).__name__} has no list of {num_layers} layers")
