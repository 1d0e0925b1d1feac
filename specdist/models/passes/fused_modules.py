"""What is called in place of the modules of a model's layers: see :mod:`specdist.models.passes.fusing`.

T flat tokens, H heads, D head width, W width of a row.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specdist.models.attention.attention import is_running, rotated_by, running_attention
from specdist.models.passes.all_reduce import Sums
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.trial import agreed

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Layers that read the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), PROJECTIONS[:2])
# What a router of experts adds to scores for its choice.
CORRECTION = "e_score_correction_bias"
# The attribute of a module that gives what a plain linear layer does, of its weight and bias.
PLAIN = "is_plain_product"
# The norms of a decoder layer in their order, where attention and MLP are normed before, and after, too.
NORMS = ("input_layernorm", "post_attention_layernorm")
MORE_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

logger = logging.getLogger(__name__)


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
class FusedRouter(Fused):
    what = "router"
    options: dict[str, Any]  # of :func:`routed`

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self.fits(hidden_states):
            return self.own(hidden_states, *args, **kwargs)
        return routed(self.module, hidden_states, *args, **self.options)


def routed(
    router: Any, hidden: Tensor, correction_E: Tensor | None = None, *, is_wide: bool, **form: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and ids. ``is_wide``: a product in float32; ``form``: of the kernel, which chooses the
    lowest of ids with equal scores, where torch promises none."""
    from specdist.kernels.experts import route

    dtype, bias_E = torch.float32 if is_wide else router.weight.dtype, getattr(router, "bias", None)
    hidden_TH, weight_EH = (each.to(dtype) for each in (hidden.reshape(-1, hidden.shape[-1]), router.weight))
    logits_TE = nn.functional.linear(hidden_TH, weight_EH, None if bias_E is None else bias_E.to(dtype))
    correction_E = getattr(router, CORRECTION, None) if correction_E is None else correction_E
    return logits_TE, *route(logits_TE, correction_E, **form)


@dataclass
class FusedAttention(Fused):
    what = "rotary embedding"
    # The class's forward with globals of its own, among which the rotary embedding is the fused one.
    function: Callable[..., Any]
    rotary: FusedRotary

    def __post_init__(self) -> None:
        if isinstance(values := getattr(self.module, "v_proj", None), nn.Module):
            values.register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, args: Any, values: Any) -> None:
        del module, args
        if self.switch.is_active:
            self.rotary.values = values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.switch.is_active:
            return self.own(*args, **kwargs)
        self.rotary.layer, self.rotary.values = getattr(self.module, "layer_idx", None), None
        return self.function(self.module, *args, **kwargs)


@dataclass
class FusedDecoderLayer(Fused):
    """``after``: the norm of what it gives, if that is of the same form. ``sums``: over ranks, in it, or
    norms in products; ``gives_sums``: whether attention and MLP give these, as its first pass shows."""

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
            joining = sums.joining(residual.nbytes) if self.gives_sums[part] else None
            output, self.gives_sums[part] = sums.watched(run, is_left=joining is not None)
            add = add if joining is None else joining.residual_norm
        return add(output, residual, *weights, epsilon=self.epsilon, **self.form._asdict())


class JoinedProjections:
    """Layers that read the same input, by one product: their weights become parts of one. It serves each of
    them once, so that an input whose numbers have changed meanwhile is read anew. ``device``: for layers on
    the meta device, which get their memory here."""

    def __init__(self, layers: Sequence[Any], device: torch.device | None = None) -> None:
        first, is_quantized = layers[0], isinstance(layers[0], QuantizedLinear)
        self._sizes = [len(layer.numbers if is_quantized else layer.weight) for layer in layers]
        if is_quantized:
            form, width = first.form, first.in_features
            self.whole: Any = QuantizedLinear(form, sum(self._sizes), width, bias=first.bias)
        else:
            width, is_biased = first.weight.shape[1], first.bias is not None
            self.whole = nn.Linear(width, sum(self._sizes), bias=is_biased, device="meta")
        for name, part in [*self.whole.named_parameters(), *self.whole.named_buffers()]:
            parts = [getattr(layer, name).data for layer in layers]
            sizes, dtype = [len(each) for each in parts], parts[0].dtype
            if device is None:
                whole = torch.cat(parts)
            else:
                whole = torch.empty(sum(sizes), *part.shape[1:], dtype=dtype, device=device)
            for layer, own in zip((self.whole, *layers), (whole, *whole.split(sizes)), strict=True):
                is_parameter = name in layer._parameters
                setattr(layer, name, nn.Parameter(own, requires_grad=False) if is_parameter else own)
        self._outputs: dict[int, Tensor] = {}
        self._inputs: weakref.ref[Tensor] | None = None
        # Until some of them read another input than the others, or none.
        self.is_used = True

    def takes_scales(self, layers: Sequence[QuantizedLinear]) -> bool:
        """Give the product the scales of quantised layers that have been filled: those of whole matrices
        become those of rows where they differ. Not if inputs have several, or a layer ends in a block."""
        whole: QuantizedLinear = self.whole
        form, sizes, begin = whole.form, self._sizes, 0
        has_border = any(size % form.border(0) for size in sizes) or (form.rows is None and form.has_zeros)
        if has_border or len({layer.static_scale for layer in layers}) > 1:
            return False
        for layer, size in zip(layers, sizes, strict=True):
            layer.whole, begin = (whole, slice(begin, begin + size)), begin + size
        whole.input_scale = layers[0].input_scale
        if form.rows is None:
            scales = [layer.weight.scales_AB for layer in layers]
            is_one = all(torch.equal(each, scales[0]) for each in scales)
            whole.form = replace(form, rows=None if is_one else 1)
            spread = [each.expand(size, -1) for each, size in zip(scales, sizes, strict=True)]
            whole.scales = scales[0] if is_one else torch.cat(spread)
        return True

    def is_of(self, layers: Sequence[Any]) -> bool:
        """Not of a copy's layers, whose weights are their own."""
        is_plain = isinstance(self.whole, nn.Linear)
        return not is_plain or layers[0].weight.data_ptr() == self.whole.weight.data_ptr()

    def of(self, index: int, inputs: Tensor) -> Tensor:
        """[.., N]: what that layer makes of its input."""
        if self._inputs is None or self._inputs() is not inputs or index not in self._outputs:
            self.is_used = not self._outputs
            self._inputs = weakref.ref(inputs)
            self._outputs = dict(enumerate(self.whole(inputs).split(self._sizes, -1)))
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
    """Takes the place of transformers' function where queries and keys are of a flat batch. In a pass that
    writes them into a cache they are written here, with the values that the layer has projected before;
    ``layer``: whose rotary embedding it is now."""

    own: Callable[..., Any]
    dtype: torch.dtype
    width: int
    layer: int | None = None
    values: Tensor | None = None

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
        from specdist.kernels.rotary import rotary

        heads = queries[0].transpose(0, 1), keys[0].transpose(0, 1)
        rotated = self._rotated_and_written(*heads, cos[0], sin[0]) or rotary(*heads, cos[0], sin[0])
        queries_THD, keys_TGD = rotated
        return queries_THD.transpose(0, 1)[None], keys_TGD.transpose(0, 1)[None]

    def _rotated_and_written(
        self, queries_THD: Tensor, keys_TGD: Tensor, *rotation: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """If the pass's attention takes these keys, and what has been projected, for its values."""
        values, self.values = self.values, None
        if values is None or values.dtype != self.dtype or self.layer is None or not is_running():
            return None
        # The view that models take: it is to be known again.
        values_TGD = values.view(*values.shape[:-1], -1, self.width)
        values_TGD = values_TGD if values_TGD.dim() == keys_TGD.dim() else values_TGD[0]
        if values_TGD.shape != keys_TGD.shape:
            return None
        return rotated_by(running_attention(), self.layer, keys_TGD, values_TGD, queries_THD, *rotation)


def siblings_of(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """The layers of a module that read the same input and are products of one kind, with the name of the
    attribute for what joins them."""
    for names in SIBLINGS:
        layers = [module._modules.get(name) for name in names]
        if len(kinds := set(map(_kind_of_product, layers))) == 1 and None not in kinds:
            yield f"joined_{names[0]}", layers


def _kind_of_product(layer: Any) -> Hashable:
    """The same of layers that may be joined; None of other modules than products of matrices."""
    if type(layer) is nn.Linear or getattr(layer, PLAIN, False):
        return layer.weight.dtype, layer.weight.shape[1], layer.bias is None
    is_quantized = isinstance(layer, QuantizedLinear) and not layer.sums_over_ranks
    return (layer.form, layer.in_features, layer.bias is None) if is_quantized else None


def to_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model memory on a device. On a GPU siblings are joined here, so that no weight moves after it
    was read: that leaves gaps for which torch's allocator has no use, gigabytes in a large model."""
    for module in model.modules() if device.type == "cuda" else ():
        for name, layers in siblings_of(module):
            vars(module)[name] = JoinedProjections(layers, device)
    model._apply(lambda own: own if own.is_cuda else torch.empty_like(own, device=device))


def join_quantized(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Let quantised layers that have been filled be parts of one product, on all ranks of a group."""
    num_alone = 0
    for module in model.modules():
        for name, layers in siblings_of(module):
            joined = vars(module).get(name)
            if joined is None or isinstance(joined.whole, nn.Linear):
                continue
            if not agreed(group, joined.takes_scales(layers)):
                del vars(module)[name]
                num_alone += len(layers)
                for layer in layers:
                    layer.whole = None
    if num_alone:
        logger.info("%d layers are not joined with others of their input, as scales differ", num_alone)


def layer_kernels() -> ModuleType:
    """Asked for at every call: a copy of a model cannot copy a Python module."""
    # Triton is not everywhere.
    from specdist.kernels import layers

    return layers
