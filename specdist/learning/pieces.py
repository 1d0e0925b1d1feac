"""A pass of a causal language model, forward and backward, in pieces that take a fraction of a round each.

A sequence is run in chunks of some tokens, a chunk layer by layer. Gradients do not flow from a chunk into
the keys and values of the chunks before it, so a step's memory is that of one chunk, whatever the sequence's
length (Dai et al. 2019, arXiv:1901.02860, section 3.2). What a layer is given, masks and rotations
included, is what the family's own code gives it: that code runs once per chunk, with layers that do nothing.

T tokens of a chunk, E hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel

# Before it begins, a piece says what kind it is; the result comes with the last one.
Pieces = Generator[str, None, Any]
NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
LAYERS = ("layers", "h")


class UnknownStructureError(Exception):
    """The model's layers are not found, or do not make its logits alone."""


class PiecewiseModel:
    """``model``, run in pieces; with ``weights`` in place of its own parameters, by their names."""

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._layers: list[nn.Module] = list(_part(self._decoder, LAYERS))  # type: ignore[call-overload]
        self._norm = _part(self._decoder, NORMS)
        self._head = model.get_output_embeddings()
        if self._head is None or len(self._layers) != model.config.get_text_config().num_hidden_layers:
            raise UnknownStructureError("layers or an output head that are not known here")
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._weights = None if weights is None else self._by_module(weights)

    def new_cache(self) -> DynamicCache:
        """Of a sequence, before its first chunk."""
        return DynamicCache(config=self._model.config)

    def forward(self, token_ids_T: Tensor, cache: DynamicCache) -> Pieces:
        """Hidden states [T, E] before the last norm, without gradients."""
        yield "embeddings"
        hidden, calls = self._handed_over(token_ids_T, cache)
        for layer, call in zip(self._layers, calls, strict=True):
            yield "layer"
            with torch.no_grad():
                hidden = self._run(layer, hidden, call)
        return hidden[0]

    def train(
        self, token_ids_T: Tensor, cache: DynamicCache, loss_of: Callable[[Tensor], Iterator[Tensor]]
    ) -> Pieces:
        """The same, and the gradients of all layers; returns the loss.

        Args:
            loss_of: of hidden states [T, E] the losses of parts of the chunk, each of which is added up.
        """
        yield "embeddings"
        hidden, calls = self._handed_over(token_ids_T, cache)
        run: list[tuple[Tensor, Tensor]] = []
        for layer, call in zip(self._layers, calls, strict=True):
            yield "layer with gradients"
            given = hidden.detach().requires_grad_()
            with torch.enable_grad():
                hidden = self._run(layer, given, call)
            run.append((given, hidden))
        last, total = hidden.detach().requires_grad_(), 0.0
        parts = loss_of(last[0])
        while True:
            yield "loss"
            with torch.enable_grad():
                loss = next(parts, None)
                if loss is None:
                    break
                torch.autograd.backward(loss)
            total += float(loss.detach())
        gradient = last.grad
        for given, hidden in reversed(run):
            yield "layer backward"
            torch.autograd.backward(hidden, gradient)
            gradient = given.grad
        for each in cache.layers:
            # Of the next chunk they are given.
            each.keys, each.values = each.keys.detach(), each.values.detach()
        return total

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """[N, V] of hidden states before the last norm."""
        normed_NE = self._call(self._norm, hidden_NE)
        head = self._head
        logits_NV: Tensor = self._call(head, normed_NE)
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV

    @torch.no_grad()
    def _handed_over(self, token_ids_T: Tensor, cache: DynamicCache) -> tuple[Tensor, list[Any]]:
        """The first layer's input, and the other arguments of every layer."""
        calls: list[Any] = []
        inputs: list[Tensor] = []

        def noting(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            inputs.append(hidden)
            calls.append((args, kwargs))
            return hidden

        with _instead(self._layers, noting):
            self._call(self._decoder, input_ids=token_ids_T[None], past_key_values=cache, use_cache=True)
        if len(calls) != len(self._layers):
            raise UnknownStructureError("layers that are not run one after the other")
        return inputs[0], calls

    def _run(self, layer: nn.Module, hidden: Tensor, call: Any) -> Tensor:
        args, kwargs = call
        output = self._call(layer, hidden, *args, **kwargs)
        found: Tensor = output if isinstance(output, Tensor) else output[0]
        return found

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._weights is None:
            return module(*args, **kwargs)
        weights = self._weights[id(module)]
        # In the precision of the weights, as they are served; the embedding has no input of its own.
        dtype = next(iter(weights.values())).dtype
        args = tuple(each.to(dtype) if torch.is_floating_point(each) else each for each in args)
        return functional_call(module, dict(weights), args, kwargs)

    def _by_module(self, weights: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Of every module that is called its parameters, by its own names of them."""
        called = {id(each) for each in (self._decoder, self._norm, self._head, *self._layers)}
        found = {}
        for prefix, module in self._model.named_modules():
            if id(module) in called:
                names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
                found[id(module)] = {name: weights[f"{prefix}.{name}"] for name in names}
        return found


@contextlib.contextmanager
def _instead(layers: list[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """Let ``function`` be called in place of the layers."""
    for layer in layers:
        layer.forward = function
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _part(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UnknownStructureError(f"{type(module).__name__} has no {names[0]}")


@torch.no_grad()
def largest_difference(model: PreTrainedModel, vocab_size: int, num_tokens: int = 24) -> float:
    """Of the logits in pieces, over two chunks, from the model's own; as a share of the largest."""
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(vocab_size, (num_tokens,), generator=generator).to(model.device)
    piecewise = PiecewiseModel(model)
    cache, parts = piecewise.new_cache(), ids_T.split(num_tokens // 2 + 1)
    found = [piecewise.logits(finished(piecewise.forward(part_T, cache))) for part_T in parts]
    expected_TV = model(ids_T[None], use_cache=False).logits[0]
    return float((torch.cat(found) - expected_TV).abs().max() / expected_TV.abs().max())


def finished(pieces: Pieces) -> Any:
    """All of the pieces at once; their result."""
    result: list[Any] = []

    def run() -> Iterator[str]:
        result.append((yield from pieces))

    deque(run(), maxlen=0)
    return result[0]
