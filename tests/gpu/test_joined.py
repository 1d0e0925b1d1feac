"""Quantised layers that read the same input are one product, which is what each of them is, with the scales
that each has. Their weights lie together before they are read.

Each check runs in a process with a fake device, where torch's products of float8 are a CPU's.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized
from specdist.models.passes.fused_modules import join_quantized, to_empty
from specdist.models.passes.fusing import FusedLayers
from specdist.models.quantized import quantized_linear
from specdist.models.quantized.quantized_linear import Product, QuantizedLinear, choose_products
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, quantize
from tests.gpu.device import DEVICE
from tests.gpu.engine_runs import GPU
from tests.gpu.processes import needs_fake_device, on_device
from tests.kernels.test_rounding import exactly

pytestmark = needs_fake_device
NUM_INPUTS, NUM_TOKENS = 64, 5
WIDTHS = {"q_proj": 48, "k_proj": 32, "v_proj": 16}
# The layers have scales of their own; one of all of them in the first, and of their inputs in the last.
FORMATS: dict[str, dict[str, Any]] = {
    "one of all": {"numbers": "float8", "rows": None, "activations": "static"},
    "one": {"numbers": "float8", "rows": None, "activations": "static"},
    "of rows": {"numbers": "float8", "rows": 1, "activations": "token"},
    "int8": {"numbers": "int8", "rows": 1, "activations": "token"},
    "int8, stored": {"numbers": "int8", "rows": 1, "activations": "static"},
    "blocks": {"numbers": "float8", "rows": 16, "columns": 32},
    "int4": {"numbers": "int4", "rows": 1, "columns": 32, "has_zeros": True},
    "apart": {"numbers": "float8", "rows": 1, "activations": "static"},
}
# Kernels of three layers with biases, in bfloat16: of rounding, products and biases.
NUM_KERNELS = {"one of all": 3, "one": 3, "of rows": 3, "int8": 7, "int8, stored": 7, "apart": 9}
# Results are rounded to bfloat16, before and after a bias is added; another layer's scale moves many by half.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


class Attention(nn.Module):
    """Layers that read the same, as they are loaded; ``weights``: what they were filled with."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        form = LayerFormat(**({"columns": None} | FORMATS[name]))
        for layer, width in WIDTHS.items():
            bias = nn.Parameter(torch.empty(width, dtype=dtype, device="meta"), requires_grad=False)
            setattr(self, layer, QuantizedLinear(form, width, NUM_INPUTS, bias=bias))
        to_empty(self, GPU)
        self.layers: list[Any] = [getattr(self, layer) for layer in WIDTHS]
        self.weights: list[QuantizedWeight] = []
        for seed, own in enumerate(self.layers):
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(own.out_features, NUM_INPUTS, generator=generator)
            weight, shape = quantize(replace(form, rows=1), whole), form.num_scales(*whole.shape)
            if form.rows != 1:
                scales_AB = 1 + torch.rand(shape, generator=generator) * (name != "one of all")
                weight = replace(weight, scales_AB=scales_AB / 400)
            scale = torch.full((1,), (1 + (name == "apart") * seed) / 128)
            scale = scale if form.activations == "static" else None
            self.weights.append(replace(weight, form=form, input_scale=scale))
            fill_quantized(own, Piece.whole("", whole.shape), self.weights[-1])
            own.bias.copy_(torch.randn(own.out_features, generator=generator))

    def check(self, inputs: Tensor, about: str) -> None:
        """Against each layer by itself, in float64."""
        on_gpu = inputs.to(GPU)
        for own, weight, found in zip(
            self.layers, self.weights, [own(on_gpu) for own in self.layers], strict=True
        ):
            product = rounded(inputs, weight) @ weight.dequantized(torch.float32).double().t()
            expected = product + own.bias.cpu().double()
            error = float(((found.cpu().double() - expected).abs() / (1 + expected.abs())).max())
            assert error < TOLERANCES[inputs.dtype], (about, inputs.dtype, error)


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_TOKENS, NUM_INPUTS, generator=torch.Generator().manual_seed(9)).to(dtype)


def rounded(inputs: Tensor, weight: QuantizedWeight) -> Tensor:
    """What a product reads, in float64."""
    if weight.form.activations is None:
        return inputs.double()
    scale = None if weight.input_scale is None else float(weight.input_scale)
    values, scales = exactly(inputs, weight.form.numbers, scale)
    return values * scales


def test_layers_of_every_format_are_one_product_with_the_scales_of_each() -> None:
    assert "3 layers are not joined with others of their input" in on_device(check_joined)


def check_joined() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    for dtype, names in ((torch.float32, FORMATS), (torch.bfloat16, NUM_KERNELS)):
        for name in names:
            module = Attention(name, dtype)
            places = [own.numbers.data_ptr() for own in module.layers]
            assert places[1] - places[0] == module.layers[0].numbers.nbytes
            join_quantized(module)
            choose_products(module, dtype)
            module.check(tokens(dtype), name)
            fused = FusedLayers(module, GPU, dtype)
            # They lie where they were filled.
            assert places == [own.numbers.data_ptr() for own in module.layers]
            with fused.active():
                DEVICE.reset()
                module.check(tokens(dtype), f"{name}, fused")
            if dtype == torch.bfloat16:
                assert DEVICE.counts().num_kernels == NUM_KERNELS[name], (name, DEVICE.counts())


def test_numbers_of_which_a_kernel_has_its_own_layout_are_held_once() -> None:
    on_device(check_own_layout)


def check_own_layout() -> None:
    def product(layer: QuantizedLinear) -> Product:
        weight_KN = layer.weight.dequantized(torch.float32).t()
        return lambda x_TK, _: (x_TK.float() @ weight_KN).bfloat16()

    module = Attention("int4", torch.bfloat16)
    join_quantized(module)
    with patch.object(quantized_linear, "_int4_weights_product", product):
        choose_products(module, torch.bfloat16)
    assert not any(own.numbers.numel() for own in module.layers)
    module.check(tokens(torch.bfloat16), "int4")


@pytest.mark.parametrize("fault", [0.0, 0.1])
def test_fast_accumulation_is_used_where_it_is_right(fault: float) -> None:
    on_device(check_fast, fault)


def check_fast(fault: float) -> None:
    """On the two capabilities that have it."""
    multiply, module, is_fast = torch._scaled_mm, Attention("one", torch.bfloat16), list[bool]()

    def scaled(*args: Any, use_fast_accum: bool, **options: Any) -> Tensor:
        is_fast.append(use_fast_accum)
        return multiply(*args, **options) * (1 + fault * use_fast_accum)

    for capability, is_used in (((9, 0), not fault), ((8, 9), not fault), ((10, 0), False)):
        with (
            patch.object(torch.cuda, "get_device_capability", return_value=capability),
            patch.object(torch, "_scaled_mm", scaled),
        ):
            choose_products(module, torch.bfloat16)
            module.layers[0](tokens(torch.bfloat16).to(GPU))
        assert is_fast[-1] == is_used
