"""Linear layers whose weights stay quantised in memory, whole or one rank's part.

Where a layer's inputs are rounded too, the product is that of the rounded numbers (integers exactly; FP8 in
``torch._scaled_mm``). Otherwise only the weights are quantised, and torch's kernels for such products read
them.
What a device has no kernel for, or a kernel that a trial finds wrong, is dequantised, a layer at a time.

A layer that is cut along its inputs ends in a sum over the ranks. A scale per token is that of a rank's own
columns, as in vLLM and TensorRT-LLM: no finer scale costs a sum over the ranks, and none rounds more.

T tokens, N outputs, K inputs, A × B scales.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.attention.attention import ABSORPTION
from specdist.models.quantized.input_rounding import (
    TRIAL_TOKENS,
    RoundedInput,
    check_kernel,
    input_scales,
    round_tokens,
    rounded_inputs,
    values_of,
)
from specdist.models.quantized.quantized_weights import DTYPES, LayerFormat, QuantizedWeight, held
from specdist.models.recurrent.cuts import CUTS, Cut
from specdist.utils.trial import Trial, agreed, check_difference, first_right, tolerance_of

# Numbers of a layer that are dequantised at a time: three copies of them, in float32, are held.
MAX_DEQUANTIZED = 2**24
# CUDA's integer products want more than 16 rows, and float8 ones widths of whole 16 numbers.
LEAST_INTEGER_ROWS, WIDTH_MULTIPLE = 32, 16
INT4_KERNEL = "torch._weight_int4pack_mm"
# Where sums in the tensor cores' own, shorter registers are another way, and much faster; others ignore it.
FAST, FAST_CAPABILITIES = ", fast accumulation", ((8, 9), (9, 0))


# The product of inputs [T, K], and what they are rounded to, if they are: [T, N].
Product = Callable[[Tensor, "RoundedInput | None"], Tensor]

logger = logging.getLogger(__name__)


class QuantizedLinear(nn.Module):
    """A linear layer [K] → [N] with a quantised weight, as buffers; on the meta device until it is filled.

    Args:
        num_outputs, num_inputs: of the whole layer.
        cut: this rank's outputs (``dim`` 0), of each of joined projections some, or inputs (1).
        group: the ranks that share the layer.
    """

    dims = (0, 1)

    def __init__(
        self,
        form: LayerFormat,
        num_outputs: int,
        num_inputs: int,
        *,
        bias: nn.Parameter | None = None,
        cut: Cut | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.form, self.cut, self.group = form, cut, group
        self.out_features, self.in_features = num_outputs, num_inputs
        if cut is not None:
            widths = [num_outputs, num_inputs]
            widths[cut.dim] = sum(map(len, cut.ranges))
            self.out_features, self.in_features = widths
        # Filled before use; the run's dtype is that of the inputs.
        width = -(-self.in_features // 2) if form.is_halved else self.in_features
        shape = form.num_scales(self.out_features, self.in_features)
        meta = torch.device("meta")
        self.register_buffer(
            "numbers", torch.empty(self.out_features, width, dtype=DTYPES[form.numbers], device=meta)
        )
        self.register_buffer("scales", torch.empty(shape, dtype=form.scale_dtype, device=meta))
        zeros = torch.empty(shape, dtype=torch.int8, device=meta) if form.has_zeros else None
        self.register_buffer("zeros", zeros)
        is_static = form.activations == "static"
        self.register_buffer("input_scale", torch.empty(1, device=meta) if is_static else None)
        self.bias = bias
        if cut is not None and cut.dim == 0:
            vars(self)[CUTS] = {"bias": cut}
        # Whether it is summed later with what others give (specdist.models.sharding.experts).
        self.is_summed_later = False
        self._product: Product = self.dequantized_product
        # Whether one kernel rounds its inputs.
        self.has_kernel = False
        # A product of several layers, and which of its outputs are this one's.
        self.whole: tuple[QuantizedLinear, slice] | None = None

    @cached_property
    def static_scale(self) -> float | None:
        """Of its inputs, if one is stored; for layers that have been filled."""
        scale = self.weight.input_scale
        return None if scale is None else float(scale)

    @property
    def weight(self) -> QuantizedWeight:
        numbers, scales, zeros = self.numbers, self.scales, self.zeros
        assert isinstance(numbers, Tensor) and isinstance(scales, Tensor)
        assert zeros is None or isinstance(zeros, Tensor)
        input_scale = self.input_scale if isinstance(self.input_scale, Tensor) else None
        return QuantizedWeight(self.form, self.in_features, numbers, scales, zeros, input_scale)

    def held(self, whole: Tensor | QuantizedWeight) -> QuantizedWeight:
        """The whole weight in this layer's format."""
        return held(self.form, whole)

    def forward(self, inputs: Tensor) -> Tensor:
        """[.., K] to [.., N]; over all ranks if the inputs are cut."""
        output = self.local_product(inputs)
        if self.sums_over_ranks and not self.is_summed_later:
            dist.all_reduce(output, group=self.group)
        return output if self.bias is None else output + self.bias

    @property
    def sums_over_ranks(self) -> bool:
        return self.group is not None and self.cut is not None and self.cut.dim == 1

    def local_product(self, inputs: Tensor) -> Tensor:
        """This rank's term of the sum, without the bias."""
        x_TK = inputs.reshape(-1, self.in_features)
        output: Tensor = self._product(x_TK, self.rounded(x_TK))
        return output.view(*inputs.shape[:-1], self.out_features)

    def rounded(self, x_TK: Tensor) -> RoundedInput | None:
        """What the product reads, if inputs are rounded."""
        if self.has_kernel:
            return round_tokens(self.form, x_TK, self.static_scale)
        scales = input_scales(self.form, x_TK, self.weight.input_scale)
        return None if scales is None else RoundedInput(rounded_inputs(self.form, x_TK, scales), scales)

    def dequantized_product(self, x_TK: Tensor, found: RoundedInput | None) -> Tensor:
        """What every other product must equal, up to rounding."""
        if found is not None:
            x_TK = values_of(self.form, found, x_TK.dtype)
        weight, border = self.weight, self.form.border(0)
        num_rows = max(border, MAX_DEQUANTIZED // self.in_features // border * border)
        slices = [
            weight.cut(0, start, min(start + num_rows, self.out_features))
            for start in range(0, self.out_features, num_rows)
        ]
        return torch.cat([F.linear(x_TK, each.dequantized(x_TK.dtype)) for each in slices], dim=1)

    def choose_product(self, dtype: torch.dtype, agree: Callable[[bool], bool] = bool) -> Trial[Product]:
        """Take the first of torch's kernels that all ranks have and that a trial finds right."""
        if self.whole is not None:
            whole, own = self.whole
            self._product = lambda x_TK, found: whole._product(x_TK, found)[:, own]
            self.numbers = whole.weight.numbers[own]  # none if a kernel has a layout of its own
            return Trial(self._product, "a part of a joined product", "", {})
        device = self.weight.numbers.device
        generator = torch.Generator().manual_seed(self.in_features)
        x_TK = torch.randn(TRIAL_TOKENS, self.in_features, generator=generator).to(device, dtype)
        x = self.rounded(x_TK)

        def check(product: Product) -> None:
            expected, found = self.dequantized_product(x_TK, x), product(x_TK, x)
            difference = float((found - expected).float().norm() / expected.float().norm())
            check_difference("its numbers differ", difference, tolerance_of("quantised product", dtype))

        trial = first_right(products_of(self, dtype), check, agree)
        self._product = trial.found or self.dequantized_product
        if trial.name == INT4_KERNEL:
            self.numbers = self.weight.numbers.new_empty(0)  # the kernel has a layout of its own
        return trial


@torch.no_grad()
def dequantize_absorbed(model: nn.Module, dtype: torch.dtype) -> None:
    """Dequantise the layers that latent attention has in its queries and outputs
    (:mod:`specdist.models.attention.latent`), whose products are with parts of the weight."""
    found: list[Any] = [
        module
        for module in model.modules()
        if ABSORPTION in vars(module) and isinstance(module.kv_b_proj, QuantizedLinear)
    ]
    for module in found:
        weight = module.kv_b_proj.weight.dequantized(dtype)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=dtype)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        module.kv_b_proj = plain
    if found:
        logger.info("%d × kv_b_proj dequantised, as latent attention needs them", len(found))


def choose_products(model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
    """Choose the arithmetic of all quantised layers, and of packed experts, and log it: the same on the ranks
    that share the model."""
    agree, modules = partial(agreed, group), list(model.modules())
    layers = [layer for layer in modules if isinstance(layer, QuantizedLinear)]
    joined = dict.fromkeys(layer.whole[0] for layer in layers if layer.whole is not None)
    modules, layers = [*joined, *modules], [*joined, *layers]
    tokens = [layer for layer in layers if layer.form.activations in ("token", "static")]
    if tokens and tokens[0].weight.numbers.is_cuda:
        _try_rounding(tokens, dtype, agree)
    counts: Counter[str] = Counter()
    refused: dict[str, None] = {}
    for layer in modules:
        choose: Any = getattr(layer, "choose_product", None)
        if choose is not None:
            trial = choose(dtype, agree)
            counts[f"{layer.form}: {trial.name or 'dequantised'}"] += 1
            refused[trial.refused] = None
    if counts:
        logger.info(
            "quantised layers: %s%s",
            ", ".join(f"{number} × {what}" for what, number in counts.items()),
            "".join(refused),
        )


def _try_rounding(layers: list[QuantizedLinear], dtype: torch.dtype, agree: Callable[[bool], bool]) -> None:
    """Round the inputs of these in one kernel, if it does so rightly."""
    forms = {layer.form: layer.static_scale for layer in layers}
    device, width = layers[0].weight.numbers.device, max(layer.in_features for layer in layers)

    def check(_: object) -> None:
        for form, scale in forms.items():
            check_kernel(form, device, dtype, width, scale)

    trial = first_right({"one kernel": lambda: True}, check, agree)
    for layer in layers:
        layer.has_kernel = trial.found or False
    trial.report(logger, "inputs rounded per token", "plain operations, which are slower")


def products_of(layer: QuantizedLinear, dtype: torch.dtype) -> dict[str, Callable[[], Product]]:
    """Torch's kernels that may compute a layer, by name, the best first."""
    kind, is_cuda = layer.form.product, layer.weight.numbers.device.type == "cuda"
    is_half = dtype == torch.bfloat16
    if kind == "int8":
        return {"torch._int_mm": lambda: _integer_product(layer)}
    if kind == "float8" and is_cuda:
        # By rows the only result is bfloat16; one scale of all inputs and one of the weight are cuBLAS's.
        ways = [("torch._scaled_mm", False), ("torch._scaled_mm by rows", True)][: 1 + is_half]
        if layer.form.activations == "token" or layer.form.rows == 1:
            ways.reverse()
        return {
            name + FAST * is_fast: partial(_scaled_product, layer, by_rows=by_rows, is_fast=is_fast)
            for name, by_rows in ways
            for is_fast in (True, False)
        }
    # On a CPU they are fast in bfloat16 only.
    if kind == "int8 weights" and is_half:
        return {"torch._weight_int8pack_mm": lambda: _int8_weights_product(layer)}
    if kind == "int4 weights" and is_half:
        return {INT4_KERNEL: lambda: _int4_weights_product(layer)}
    return {}


def _integer_product(layer: QuantizedLinear) -> Product:
    """int8 times int8, summed in int32."""

    def product(x_TK: Tensor, found: RoundedInput | None) -> Tensor:
        assert found is not None
        weight, num_tokens = layer.weight, len(x_TK)
        numbers, scales = found
        if x_TK.is_cuda and num_tokens < LEAST_INTEGER_ROWS:
            numbers = F.pad(numbers, (0, 0, 0, LEAST_INTEGER_ROWS - num_tokens))
        sums_TN = torch._int_mm(numbers, weight.numbers.t())[:num_tokens]
        return (sums_TN * (scales * weight.scales_AB.t())).to(x_TK.dtype)

    return product


def _scaled_product(layer: QuantizedLinear, *, by_rows: bool, is_fast: bool) -> Product:
    """float8 times float8. ``by_rows``: the kernel applies the scales, of compute capability 9.0 or more."""
    device = layer.weight.numbers.device
    if is_fast and torch.cuda.get_device_capability(device) not in FAST_CAPABILITIES:
        raise ValueError("it is for compute capabilities 8.9 and 9.0")
    if layer.in_features % WIDTH_MULTIPLE or layer.out_features % WIDTH_MULTIPLE:
        raise ValueError(f"widths are not multiples of {WIDTH_MULTIPLE}")
    one = torch.ones((), device=device)
    multiply = partial(torch._scaled_mm, use_fast_accum=is_fast)

    weight = layer.weight
    weight_scales = weight.scales_AB.t().expand(1, layer.out_features if by_rows else -1).contiguous()
    # cuBLAS has a scale of all inputs, and of the whole weight.
    input_scale = weight.input_scale if weight_scales.numel() == 1 else None

    def product(x_TK: Tensor, found: RoundedInput | None) -> Tensor:
        assert found is not None
        (numbers, scales), numbers_KN = found, layer.weight.numbers.t()
        if by_rows:
            scales = scales.expand(len(x_TK), 1).contiguous()  # nothing to do after the kernel
        elif input_scale is not None:
            scales = input_scale
        if by_rows or input_scale is not None:
            return multiply(numbers, numbers_KN, scales, weight_scales, out_dtype=x_TK.dtype)
        sums_TN = multiply(numbers, numbers_KN, one, one, out_dtype=torch.float32)
        return (sums_TN * (scales * weight_scales)).to(x_TK.dtype)

    return product


def _int8_weights_product(layer: QuantizedLinear) -> Product:
    scales_N = layer.weight.scales_AB[:, 0].expand(layer.out_features).to(torch.bfloat16)

    def product(x_TK: Tensor, _: RoundedInput | None) -> Tensor:
        return torch._weight_int8pack_mm(x_TK, layer.weight.numbers, scales_N)

    return product


def _int4_weights_product(layer: QuantizedLinear) -> Product:
    """The product with a weight in the kernel's own layout."""
    weight, form = layer.weight, layer.form
    assert form.columns is not None
    if weight.numbers.device.type == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.integers().int() + 8, 1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        # It reads the left of two columns in the upper half.
        swapped = (weight.numbers & 15) << 4 | weight.numbers >> 4
        packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        multiply = torch.ops.aten._weight_int4pack_mm
    offsets_AB = torch.zeros_like(weight.scales_AB)
    if weight.zeros_AB is not None:
        offsets_AB = -weight.zeros_AB * weight.scales_AB
    scales_BA2 = torch.stack([weight.scales_AB.t(), offsets_AB.t()], dim=-1).to(torch.bfloat16).contiguous()

    def product(x_TK: Tensor, _: RoundedInput | None) -> Tensor:
        found: Tensor = multiply(x_TK, packed, form.columns, scales_BA2)
        return found

    return product
