"""Inputs that are rounded on ranks with scales of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.models.quantized.quantized_weights import LayerFormat, quantize
from specdist.models.recurrent.cuts import Cut

NUM_INPUTS = 48


@pytest.mark.parametrize(("numbers", "num_ranks"), [("int8", 4), ("float8", 2)])
def test_ranks_with_scales_of_their_own_round_no_more_than_one(numbers: Any, num_ranks: int) -> None:
    """Their sum is as near to the product of plain inputs as that of one scale per token, and as near to this
    as both roundings explain; a scale that is off by an eighth is not."""
    form = LayerFormat(numbers=numbers, rows=1, columns=None, activations="token")
    generator = torch.Generator().manual_seed(0)
    weight = quantize(form, torch.randn(64, 2 * NUM_INPUTS, generator=generator))
    # Columns, and so ranks, of very different sizes.
    inputs = torch.randn(300, 2 * NUM_INPUTS, generator=generator) * torch.linspace(0.1, 4, 2 * NUM_INPUTS)
    exact = inputs.double() @ weight.dequantized(torch.float32).double().t()
    width = 2 * NUM_INPUTS // num_ranks
    cuts = [None, *(Cut(1, (range(rank * width, (rank + 1) * width),)) for rank in range(num_ranks))]
    layers = [QuantizedLinear(form, 64, 2 * NUM_INPUTS, cut=cut).to_empty(device="cpu") for cut in cuts]
    for layer in layers:
        fill_quantized(layer, Piece.whole("", (64, 2 * NUM_INPUTS)), weight)
    whole, *terms = (
        layer.local_product(part)
        for layer, part in zip(layers, (inputs, *inputs.split(width, dim=1)), strict=True)
    )
    noise = float((whole - exact).norm())
    assert 0.3 * noise < float((sum(terms) - exact).norm()) < 1.02 * noise
    assert float((sum(terms) - whole).norm()) < 1.5 * noise
    assert float((sum(terms[:-1], terms[-1] * 1.125) - whole).norm()) > 3 * noise
