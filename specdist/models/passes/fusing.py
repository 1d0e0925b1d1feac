"""The small steps of a model's layers in fused kernels, in any transformers model whose formulas they have.

A replacement is found by what a module is made of, and then tried: on random numbers, in float32 and in the
model's dtype, it must give what the module's own code gives on that device. A module for which it does not
keeps its own code. The matrix products between stay the modules' own, sharded or not, but those of the same
input are joined, without a trial. No trial communicates: ranks of a sharded model compare at the end.

T flat tokens, H heads, D head width, W width of a row.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from specdist.models.passes import fused_modules
from specdist.models.passes.all_reduce import SUMMING, Sums
from specdist.models.passes.fused_modules import (
    MORE_NORMS,
    NORMS,
    PROJECTIONS,
    Fused,
    NormForm,
    layer_kernels,
)
from specdist.models.passes.fusing_trials import Attend, Scale, differences, twin_of
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.packages import cache_argument
from specdist.utils.trial import first_right, said_of, tolerance_of, why_not

ROTARY = "apply_rotary_pos_emb"
ATTENTION, MLP = "self_attn", "mlp"
# What a model may hand to its layers for attention, and its cache.
HANDED_OVER = ("attention_mask", "position_ids", "position_embeddings")
RENAMING = "transformers.utils.deprecation"
# Sizes of the numbers that are tried: rows that fill no block, and heads as of grouped queries.
NUM_ROWS, NUM_HEADS, NUM_KV_HEADS = 5, 6, 2
MLP_WIDTH = 1100
# Tokens of a router's trial; how scores may be normalised: the share of their sum, and the rest.
NUM_TOKENS, DENOMINATORS = 12, ((1.0, 0.0), (0.0, 1.0), (1.0, 1e-20), (1.0, 1e-6))

logger = logging.getLogger(__name__)


class FusedLayers:
    """Switches a model's layers to fused kernels, only inside :meth:`active`: other code may share the
    model."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.is_active = False
        self.num_fused: Counter[str] = Counter()
        forms, sums = Forms(device, dtype), vars(model).get(SUMMING)
        if reason := why_not(layer_kernels):
            logger.warning("layers on %s: plain operations, which are slower: %s", device, reason)
            forms.reasons["kernels"] = reason
        found = {} if reason else self._fuse(model, forms, sums)
        if not reason:
            logger.info("%s", self._report(forms, device, dtype))
        if sums is not None:
            layers = [each for each in found.values() if isinstance(each, fused_modules.FusedDecoderLayer)]
            of_layers = [(layer.epsilon, layer.form, layer.after is not None) for layer in layers]
            of_routers = [each for each in found.values() if isinstance(each, fused_modules.FusedRouter)]
            of_all = f"{self.num_fused} {of_layers} {[each.options for each in of_routers]}"
            if not sums.agree(self.num_fused.total(), of_all, forms.reasons):
                for router in of_routers:  # all ranks choose alike
                    router.module.forward = router.own

    def _fuse(self, model: nn.Module, forms: Forms, sums: Sums | None) -> dict[Any, Fused]:
        found: dict[Any, Fused] = {}
        for module in model.modules():
            found |= forms.projections(self, module)
            fused = forms.fused(self, module)
            found |= {} if fused is None else {module: fused}
        for module, fused in found.items():
            fused.module.forward = fused
            self.num_fused[f"{fused.what} of {type(module).__name__}"] += 1
        for owner in model.modules():
            for stack in owner.children():
                if isinstance(stack, nn.ModuleList):
                    norms = [getattr(layer, NORMS[0], None) for layer in [*stack][1:]]
                    for layer, norm in zip(stack, [*norms, getattr(owner, "norm", None)], strict=True):
                        _norm_after(found.get(layer), found.get(norm), sums)
        return found

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False

    def _report(self, forms: Forms, device: torch.device, dtype: torch.dtype) -> str:
        fused = ", ".join(f"{number} × {what}" for what, number in self.num_fused.items())
        return f"layers in {dtype} on {device}: fused kernels: {fused or 'none'}{said_of(forms.reasons)}"


class Forms:
    """Finds out, once for each kind of module, which fused form gives its numbers; ``reasons`` why none
    does."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.reasons: dict[str, str] = {}
        self._device = device
        self._dtype = dtype
        # The formula shows in float32, the places where it rounds in the model's dtype.
        self._dtypes = list(dict.fromkeys([torch.float32, dtype]))
        self._generator = torch.Generator().manual_seed(0)
        self._found: dict[Hashable, Any] = {}

    def fused(self, switch: FusedLayers, module: nn.Module) -> Fused | None:
        """What takes the place of the module's forward; None if it keeps its own."""
        shared = (switch, module, module.forward, self._dtype)
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            form = self._form_of_norm(module)
            return None if form is None else fused_modules.FusedNorm(*shared, _epsilon(module), form)
        if hasattr(module, "top_k") and "weight" in module._parameters and not module._modules:
            numbers = (value for value in vars(module).values() if isinstance(value, (float, int, str)))
            kind = (type(module), module.weight.shape, *numbers)
            found = self._once(kind, module, lambda each: _router_options(each, self._dtype, self._generator))
            return None if found is None else fused_modules.FusedRouter(*shared, found)
        if all(hasattr(module, attribute) for attribute in (*PROJECTIONS, "act_fn")):
            is_tanh = self._once((type(module), type(module.act_fn)), module, self._activation)
            return None if is_tanh is None else fused_modules.FusedMlp(*shared, is_tanh)
        if set(module._modules) in ({ATTENTION, MLP, *NORMS}, {ATTENTION, MLP, *MORE_NORMS}):
            # Numbers and words that layers of a class may differ by.
            plain = {name: value for name, value in vars(module).items() if isinstance(value, (float, str))}
            key = (type(module), *sorted(plain.items()))
            found = self._once(key, module, lambda each: self._layer(switch, each))
            return None if found is None else fused_modules.FusedDecoderLayer(*shared, *found)
        own = _plain_forward(module)
        if isinstance(own, FunctionType) and ROTARY in own.__code__.co_names and ROTARY in own.__globals__:
            key = (own, getattr(module, "head_dim", None))
            found = self._once(key, module, self._attention)
            return None if found is None else fused_modules.FusedAttention(*shared, *found)
        return None

    def projections(self, switch: FusedLayers, module: nn.Module) -> dict[Any, Fused]:
        """What takes the place of the forwards of its layers that read the same input."""
        found: dict[Any, Fused] = {}
        for name, layers in fused_modules.siblings_of(module):
            joined = vars(module).get(name)  # since weights were read, or of another runner
            if joined is None or not joined.is_of(layers):
                # Of quantised layers others have no scales.
                if isinstance(layers[0], QuantizedLinear) or layers[0].weight.dtype != self._dtype:
                    continue
                joined = vars(module)[name] = fused_modules.JoinedProjections(layers)
            for index, layer in enumerate(layers):
                found[layer] = fused_modules.FusedProjection(
                    switch, layer, layer.forward, self._dtype, joined, index
                )
        return found

    def _once(self, key: Hashable, module: nn.Module, find: Callable[[nn.Module], Any]) -> Any:
        if key not in self._found:
            with torch.inference_mode():
                trial = first_right({type(module).__name__: lambda: find(module)}, lambda _: None)
            self._found[key] = trial.found
            self.reasons |= trial.reasons
        return self._found[key]

    def _form_of_norm(self, module: nn.Module) -> NormForm | None:
        form: NormForm | None = self._once(
            (type(module), _epsilon(module), _width(module)), module, self._norm_form
        )
        return form

    def _norm_form(self, module: nn.Module) -> NormForm:
        width = _width(module)
        if width is None or list(dict(module.named_parameters())) != ["weight"]:
            raise ValueError("it has other parameters than a weight of each number")
        if module.weight.dtype != self._dtype:
            raise ValueError(f"its weight is in {module.weight.dtype}")
        epsilon = _epsilon(module)
        forms = list(itertools.starmap(NormForm, itertools.product((0.0, 1.0), (True, False))))
        trials = []
        for dtype in self._dtypes:
            weight = 1 + 0.3 * self._random(dtype, width)
            inputs = 2 * self._random(dtype, 1, NUM_ROWS, width)
            twin = twin_of(module)
            twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
            expected = type(module).forward(twin, inputs)
            trials.append(
                [
                    differences(
                        layer_kernels().rms_norm(inputs, weight, epsilon=epsilon, **form._asdict()), expected
                    )
                    for form in forms
                ]
            )
        return forms[self._best(trials)]

    def _layer(self, switch: FusedLayers, module: nn.Module) -> tuple[float, NormForm]:
        """Epsilon and form of its norms, if it adds and hands over like a fused layer."""
        norms = {name: part for name, part in module._modules.items() if name in MORE_NORMS and part}
        forms = {(_epsilon(norm), self._form_of_norm(norm)) for norm in norms.values()}
        epsilon, form = forms.pop()
        if forms or form is None:
            raise ValueError("its norms are of several kinds, or not fused")
        forward = type(module).forward
        kwargs = {name: object() for name in (*HANDED_OVER, cache_argument(forward))}
        trials = []
        for dtype in self._dtypes:
            twin, width = twin_of(module), _width(norms[NORMS[0]])
            assert width is not None
            attend, scale = Attend(self._random(dtype, width)), Scale(self._random(dtype, width))
            twin._modules = {ATTENTION: attend, MLP: scale}  # projections may communicate
            for name, norm in norms.items():
                twin._modules[name] = own = twin_of(norm)
                weight = 1 + 0.3 * self._random(dtype, width)
                own._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
            hidden = 2 * self._random(dtype, 1, NUM_ROWS, width)
            expected = forward(twin, hidden, **kwargs)
            handed_over = {name: attend.called_with.get(name) for name in kwargs}
            found = fused_modules.FusedDecoderLayer(switch, twin, forward, dtype, epsilon, form)
            trials.append([differences(found.run(hidden, kwargs), expected)])
            if handed_over != kwargs:
                raise ValueError("it hands other things to its attention")
        self._best(trials)
        return epsilon, form

    def _activation(self, module: nn.Module) -> bool:
        """Whether it is GELU by tanh, and not SiLU."""
        trials = []
        for dtype in self._dtypes:
            twin = twin_of(module)
            gate, up, down = scales = [Scale(self._random(dtype, MLP_WIDTH)) for _ in PROJECTIONS]
            twin._modules = {**module._modules, **dict(zip(PROJECTIONS, scales, strict=True))}
            inputs = 3 * self._random(dtype, 1, NUM_ROWS, MLP_WIDTH)
            expected = type(module).forward(twin, inputs)
            trials.append(
                [
                    differences(
                        down(layer_kernels().gated_activation(gate(inputs), up(inputs), is_tanh=is_tanh)),
                        expected,
                    )
                    for is_tanh in (False, True)
                ]
            )
        return bool(self._best(trials))

    def _attention(self, module: nn.Module) -> tuple[Callable[..., Any], fused_modules.FusedRotary]:
        """The forward of the module's class with the fused rotary embedding, and this one."""
        own = _plain_forward(module)
        width = getattr(module, "head_dim", None)
        if not isinstance(width, int) or width % 2 or getattr(module, "rotary_ndims", width) != width:
            raise ValueError("it does not rotate whole heads")
        own_rotary = own.__globals__[ROTARY]
        trials = []
        for dtype in self._dtypes:
            queries, keys = (
                self._random(dtype, 1, NUM_ROWS, heads, width).transpose(1, 2)
                for heads in (NUM_HEADS, NUM_KV_HEADS)
            )
            cos, sin = self._random(dtype, 2, 1, NUM_ROWS, width)
            fused = fused_modules.FusedRotary(own_rotary, dtype, width)
            expected = own_rotary(queries, keys, cos, sin)
            found = fused(queries, keys, cos, sin)
            trials.append([max(map(differences, found, expected))])
        self._best(trials)
        fused = fused_modules.FusedRotary(own_rotary, self._dtype, width)
        function = FunctionType(
            own.__code__, {**own.__globals__, ROTARY: fused}, own.__name__, own.__defaults__, own.__closure__
        )
        function.__kwdefaults__ = own.__kwdefaults__
        return function, fused

    def _best(self, trials: list[list[tuple[float, float]]]) -> int:
        """The form, of those tried in each dtype, with the smallest differences. Raises ValueError if none
        is within the tolerances."""
        totals = {}
        for index, tried in enumerate(zip(*trials, strict=True)):
            # Not "difference > tolerance": NaN is also wrong.
            if all(
                largest <= tolerance_of("formula", dtype)
                for dtype, (largest, _) in zip(self._dtypes, tried, strict=True)
            ):
                totals[index] = sum(mean for _, mean in tried)
        if not totals:
            least = min(max(largest for largest, _ in tried) for tried in zip(*trials, strict=True))
            raise ValueError(f"its numbers differ by {least:.3g}")
        return min(totals, key=totals.__getitem__)

    def _random(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, dtype)


def _plain_forward(module: nn.Module) -> Any:
    """The forward of the class, without transformers' wrapper that takes an argument by its old name, too."""
    own: Any = type(module).forward
    is_wrapper = getattr(own, "__globals__", {}).get("__name__") == RENAMING
    return own.__wrapped__ if is_wrapper else own


def _width(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.dim() == 1 else None


def _epsilon(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", math.nan)))


def _norm_after(layer: Fused | None, norm: Fused | None, sums: Sums | None) -> None:
    """Let a layer do the norm of what it gives, if that is of the form of its own, and its own sums."""
    if isinstance(layer, fused_modules.FusedDecoderLayer):
        layer.sums = sums
        if isinstance(norm, fused_modules.FusedNorm):
            is_alike = (norm.epsilon, norm.form) == (layer.epsilon, layer.form)
            layer.after = norm if is_alike else None


def _router_options(module: Any, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """With which ``routed`` gives the logits and ids of a router's own code, and its weights but for the last
    places of float32. Raises ValueError if there are none."""
    (num_experts, width), twin = module.weight.shape, twin_of(module)
    # A token's logits differ in any dtype, but for the last one's, whose sigmoids are tiny. Of the others a
    # small shift is lost in products of half precision.
    hidden_TH = torch.eye(NUM_TOKENS, width)
    hidden_TH[:, -1] = torch.tensor([2.0**-12] * (NUM_TOKENS - 1) + [-47.0])
    order_EH = torch.rand(num_experts, width, generator=generator).argsort(0)
    weight_EH = ((order_EH - num_experts // 2) / (num_experts / 8)).to(module.weight)
    weight_EH[:, -1] = 1.0
    correction_E = -0.3 * torch.rand(num_experts, generator=generator).to(weight_EH.device)
    bias_E = weight_EH.new_full((num_experts,), -0.25)
    numbers = {"weight": weight_EH, "bias": bias_E, fused_modules.CORRECTION: correction_E}
    if unknown := {*module._parameters, *module._buffers} - {*numbers}:
        raise ValueError(f"it has other numbers, {', '.join(sorted(unknown))}")
    twin._buffers = {name: numbers[name] for name in (*module._parameters, *module._buffers)}
    twin._parameters = {}
    inputs = [hidden_TH.to(weight_EH.device, dtype), correction_E]
    inputs = inputs[: len(inspect.signature(type(module).forward).parameters) - 1]
    own_logits, own_weights, own_ids = type(module).forward(twin, *inputs)
    factor = getattr(module, "routed_scaling_factor", getattr(module, "router_scaling_factor", 1.0))
    for is_wide, is_sigmoid, (share, rest) in itertools.product((False, True), (False, True), DENOMINATORS):
        options = {
            "is_wide": is_wide, "is_sigmoid": is_sigmoid, "share": share / factor, "rest": rest / factor,
            "num_chosen": module.top_k, "num_groups": getattr(module, "num_group", None) or 1,
            "num_kept": getattr(module, "topk_group", None) or 1, "dtype": own_weights.dtype,
        }  # fmt: skip
        logits, weights, ids = fused_modules.routed(twin, *inputs, **options)
        if (
            torch.equal(logits.float(), own_logits.float())
            and torch.equal(ids[:-1].sort().values, own_ids[:-1].sort().values)
            and torch.allclose(weights.sort().values, own_weights.sort().values, rtol=1e-5, atol=0)
        ):
            return options
    raise ValueError("its logits, its choice or its weights are of another form")
