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
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from specdist.models.attention.attention import ABSORPTION
from specdist.models.quantized.input_rounding import (
    TRIAL_TOKENS,
    LastInput,
    RoundedInput,
    check_kernel,
    input_scales,
    round_tokens,
    rounded_inputs,
    values_of,
)
from specdist.models.quantized.quantized_weights import DTYPES, LayerFormat, QuantizedWeight, held
from specdist.models.recurrent.cuts import CUTS, Cut
from specdist.utils.trial import Trial, check_difference, first_right, tolerance_of

# Numbers of a layer that are dequantised at a time: three copies of them, in float32, are held.
MAX_DEQUANTIZED = 2**24
# CUDA's integer products want more than 16 rows, and float8 ones widths of whole 16 numbers.
LEAST_INTEGER_ROWS, WIDTH_MULTIPLE = 32, 16
INT4_KERNEL = "torch._weight_int4pack_mm"


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
        # The last input of all layers, and the module that has this one: see :func:`choose_products`.
        self.last_input = LastInput()
        self.owner: str | None = None

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
        output: Tensor = self._product(x_TK, self._rounded(inputs, x_TK))
        return output.view(*inputs.shape[:-1], self.out_features)

    def _rounded(self, inputs: Tensor, x_TK: Tensor) -> RoundedInput | None:
        reading = self._reading
        found = None if reading is None else self.last_input.of(inputs, reading, self)
        if found is None:
            if self.last_input.has_kernel and self.form.activations == "token":
                found = round_tokens(self.form, x_TK)
            elif (scales := self.input_scales(x_TK)) is not None:
                found = RoundedInput(rounded_inputs(self.form, x_TK, scales), scales)
            if found is not None and reading is not None:
                self.last_input.keep(inputs, reading, self, found)
        return found

    @property
    def _reading(self) -> Hashable:
        """A key that layers share if they round an input alike; None of one with a scale of its own."""
        if self.owner is None or self.form.activations == "static":
            return None
        return self.owner, self.form.numbers, self.form.activations, self.form.columns

    def input_scales(self, x_TK: Tensor) -> Tensor | None:
        """Scales of each token [T, 1], of its groups [T, B], or of all [1, 1]: float32. None if no inputs
        are rounded."""
        scale = self.input_scale
        return input_scales(self.form, x_TK, scale if isinstance(scale, Tensor) else None)

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

    def choose_product(self, dtype: torch.dtype) -> Trial[Product]:
        """Take the first of torch's kernels that this device has and that a trial finds right."""
        device = self.weight.numbers.device
        generator = torch.Generator().manual_seed(self.in_features)
        x_TK = torch.randn(TRIAL_TOKENS, self.in_features, generator=generator).to(device, dtype)
        scales = self.input_scales(x_TK)
        x = None if scales is None else RoundedInput(rounded_inputs(self.form, x_TK, scales), scales)

        def check(product: Product) -> None:
            expected, found = self.dequantized_product(x_TK, x), product(x_TK, x)
            difference = float((found - expected).float().norm() / expected.float().norm())
            check_difference("its numbers differ", difference, tolerance_of("quantised product", dtype))

        trial = first_right(products_of(self, dtype), check)
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


def choose_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Choose the arithmetic of all quantised layers, and of packed experts, and log it. From then on what
    several layers of a module read is rounded once."""
    last_input = LastInput()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.last_input, layer.owner = last_input, name.rpartition(".")[0]
    tokens = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    tokens = [layer for layer in tokens if layer.form.activations == "token"]
    if tokens and tokens[0].numbers.is_cuda:
        _try_rounding(last_input, tokens, dtype)
    counts: Counter[str] = Counter()
    refused: dict[str, None] = {}
    for layer in model.modules():
        choose: Any = getattr(layer, "choose_product", None)
        if choose is not None:
            trial = choose(dtype)
            counts[f"{layer.form}: {trial.name or 'dequantised'}"] += 1
            refused[trial.refused] = None
    if counts:
        logger.info(
            "quantised layers: %s%s",
            ", ".join(f"{number} × {what}" for what, number in counts.items()),
            "".join(refused),
        )


def _try_rounding(last_input: LastInput, layers: list[QuantizedLinear], dtype: torch.dtype) -> None:
    """Round the inputs of these in one kernel, if it does so rightly."""
    forms = {layer.form for layer in layers}
    device, width = layers[0].weight.numbers.device, max(layer.in_features for layer in layers)

    def check(_: object) -> None:
        for form in forms:
            check_kernel(form, device, dtype, width)

    trial = first_right({"one kernel": lambda: True}, check)
    last_input.has_kernel = trial.found or False
    trial.report(logger, "inputs rounded per token", "plain operations, which are slower")


def products_of(layer: QuantizedLinear, dtype: torch.dtype) -> dict[str, Callable[[], Product]]:
    """Torch's kernels that may compute a layer, by name, the best first."""
    kind, is_cuda = layer.form.product, layer.weight.numbers.device.type == "cuda"
    is_half = dtype == torch.bfloat16
    if kind == "int8":
        return {"torch._int_mm": lambda: _integer_product(layer)}
    if kind == "float8" and is_cuda:
        by_rows: dict[str, Callable[[], Product]] = {}
        if is_half:  # the only result that it has
            by_rows = {"torch._scaled_mm by rows": lambda: _scaled_product(layer, by_rows=True)}
        return {**by_rows, "torch._scaled_mm": lambda: _scaled_product(layer, by_rows=False)}
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


def _scaled_product(layer: QuantizedLinear, *, by_rows: bool) -> Product:
    """float8 times float8. ``by_rows``: the kernel applies the scales; compute capability 9.0 or more."""
    if layer.in_features % WIDTH_MULTIPLE or layer.out_features % WIDTH_MULTIPLE:
        raise ValueError(f"widths are not multiples of {WIDTH_MULTIPLE}")
    one = torch.ones((), device=layer.weight.numbers.device)

    def product(x_TK: Tensor, found: RoundedInput | None) -> Tensor:
        assert found is not None
        weight = layer.weight
        numbers, scales = found
        if by_rows:
            return torch._scaled_mm(
                numbers,
                weight.numbers.t(),
                scales.expand(len(x_TK), 1).contiguous(),
                weight.scales_AB.t().expand(1, layer.out_features).contiguous(),
                out_dtype=x_TK.dtype,
            )
        sums_TN = torch._scaled_mm(numbers, weight.numbers.t(), one, one, out_dtype=torch.float32)
        return (sums_TN * (scales * weight.scales_AB.t())).to(x_TK.dtype)

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
