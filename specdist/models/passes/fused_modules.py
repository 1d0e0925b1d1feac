"""What is called in place of the modules of a model's layers: see :mod:`specdist.models.passes.fusing`.

T flat tokens, H heads, D head width, W width of a row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.passes.all_reduce import PRODUCT, Sums

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The norms of a decoder layer in their order, where attention and MLP are normed before, and after, too.
NORMS = ("input_layernorm", "post_attention_layernorm")
MORE_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Switch(Protocol):
    """A switch of a model's modules: whether they are fused in what runs now."""

    is_active: bool


class NormForm(NamedTuple):
    """Variants of the formula of RMS norms, as :func:`specdist.kernels.layers.rms_norm` takes them."""

    weight_offset: float
    rounds_first: bool


@dataclass
class Fused:
    """What is called in place of a module's forward; the arguments that it does not know go to the module."""

    what: ClassVar[str]

    switch: Switch
    module: nn.Module
    own: Callable[..., Any]
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def fits(self, inputs: Tensor) -> bool:
        return self.switch.is_active and inputs.dtype == self.dtype


@dataclass
class FusedNorm(Fused):
    what = "RMS norm"
    epsilon: float
    form: NormForm
    # What has been normed by the layer before, and its norm.
    done: tuple[weakref.ref[Tensor], Tensor] | None = None

    def __call__(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.fits(inputs):
            return self.own(inputs, *args, **kwargs)
        done, self.done = self.done, None
        if done is not None and done[0]() is inputs:
            return done[1]
        return layer_kernels().rms_norm(
            inputs, self.module.weight, epsilon=self.epsilon, **self.form._asdict()
        )


@dataclass
class FusedMlp(Fused):
    what = "gated activation"
    is_tanh: bool
    # Of the projections to gates and ups with the activation in it, where it is the fastest and right.
    product: Any = None

    def __call__(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.fits(inputs):
            return self.own(inputs, *args, **kwargs)
        gate, up, down = (getattr(self.module, name) for name in PROJECTIONS)
        if self.product is not None and self.product.is_by_kernel(inputs):
            return down(self.product.gated(inputs, is_tanh=self.is_tanh))
        return down(layer_kernels().gated_activation(gate(inputs), up(inputs), is_tanh=self.is_tanh))


@dataclass
class FusedAttention(Fused):
    what = "rotary embedding"
    # The class's forward with globals of its own, among which the rotary embedding is the fused one.
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.switch.is_active:
            return self.own(*args, **kwargs)
        return self.function(self.module, *args, **kwargs)


@dataclass
class FusedDecoderLayer(Fused):
    """``after``: the norm of what it gives, if that is of the same form. ``sums``: over ranks, in it;
    ``gives_sums``: whether its attention and its MLP give them, as its first pass shows."""

    what = "residual and norm"
    epsilon: float
    form: NormForm
    after: FusedNorm | None = None
    sums: Sums | None = None
    gives_sums: list[bool] = field(default_factory=lambda: [False, False])

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or not self.fits(hidden_states):
            return self.own(hidden_states, *args, **kwargs)
        return self.run(hidden_states, kwargs)

    def run(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The sums after attention and MLP are each in one kernel with the norms around it."""
        layer: Any = self.module
        normed = layer.input_layernorm(hidden)
        weight = layer.post_attention_layernorm.weight
        has_more = hasattr(layer, MORE_NORMS[-1])
        weights = (weight, layer.pre_feedforward_layernorm.weight) if has_more else (None, weight)
        attend = functools.partial(layer.self_attn, hidden_states=normed, **kwargs)
        hidden, normed = self._add(0, lambda: attend()[0], hidden, *weights)
        run_mlp = functools.partial(layer.mlp, normed)
        if self.after is None:
            output = run_mlp()
            return hidden + (layer.post_feedforward_layernorm(output) if has_more else output)
        weight = layer.post_feedforward_layernorm.weight if has_more else None
        after: Any = self.after
        hidden, normed = self._add(1, run_mlp, hidden, weight, after.module.weight)
        after.done = weakref.ref(hidden), normed
        return hidden

    def _add(self, part: int, run: Callable[[], Tensor], residual: Tensor, *weights: Tensor | None) -> Any:
        """The residual with what attention (0) or MLP (1) gives, and its norm."""
        add, sums = layer_kernels().residual_norm, self.sums
        if sums is None:
            output = run()
        else:
            is_left = self.gives_sums[part] and residual.nbytes <= sums.joined_bytes
            output, self.gives_sums[part] = sums.watched(run, is_left=is_left)
            add = sums.joined.residual_norm if is_left else add
        return add(output, residual, *weights, epsilon=self.epsilon, **self.form._asdict())


class JoinedProjections:
    """Layers that read the same input, by one product: their weights become parts of one. It serves each of
    them once, so that an input whose numbers have changed meanwhile is read anew."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._sizes = [len(layer.weight) for layer in layers]
        self.weight, self.bias = self._joined(layers, "weight"), None
        if layers[0].bias is not None:
            self.bias = self._joined(layers, "bias")
        self._outputs: dict[int, Tensor] = {}
        self._inputs: weakref.ref[Tensor] | None = None
        # Until some of them read another input than the others, or none.
        self.is_used = True

    def _joined(self, layers: Sequence[Any], name: str) -> Tensor:
        whole = torch.cat([getattr(layer, name).data for layer in layers])
        for layer, own in zip(layers, whole.split(self._sizes), strict=True):
            getattr(layer, name).data = own
        return whole

    def is_of(self, layers: Sequence[Any]) -> bool:
        """Not of a copy's layers, whose weights are their own."""
        return layers[0].weight.data_ptr() == self.weight.data_ptr()

    def of(self, index: int, inputs: Tensor) -> Tensor:
        """[.., N]: what that layer makes of its input."""
        if self._inputs is None or self._inputs() is not inputs or index not in self._outputs:
            self.is_used = not self._outputs
            self._inputs = weakref.ref(inputs)
            product: Any = getattr(self, PRODUCT, F.linear)
            parts = product(inputs, self.weight, self.bias).split(self._sizes, -1)
            self._outputs = dict(enumerate(parts))
        return self._outputs.pop(index)


@dataclass
class FusedProjection(Fused):
    what = "joined product"
    joined: JoinedProjections
    index: int

    def __call__(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.fits(inputs) or not self.joined.is_used:
            return self.own(inputs, *args, **kwargs)
        return self.joined.of(self.index, inputs)


@dataclass
class FusedRotary:
    """Takes the place of transformers' function where queries and keys are of a flat batch."""

    own: Callable[..., Any]
    dtype: torch.dtype
    width: int

    def __call__(
        self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Queries [1, H, T, D] and keys [1, G, T, D], cos and sin [1, T, D]."""
        tensors = (queries, keys, cos, sin)
        fits = (
            not args
            and not kwargs
            and all(len(x) == 1 and x.shape[-1] == self.width and x.dtype == self.dtype for x in tensors)
        )
        if not fits:
            own: tuple[Tensor, Tensor] = self.own(*tensors, *args, **kwargs)
            return own
        queries_THD, keys_TGD = layer_kernels().rotary(
            queries[0].transpose(0, 1), keys[0].transpose(0, 1), cos[0], sin[0]
        )
        return queries_THD.transpose(0, 1)[None], keys_TGD.transpose(0, 1)[None]


def layer_kernels() -> ModuleType:
    """Asked for at every call: a copy of a model cannot copy a Python module."""
    # Triton is not everywhere.
    from specdist.kernels import layers

    return layers
