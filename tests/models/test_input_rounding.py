"""What several quantised layers read is rounded once, and is what each of them would round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdist.models.loading.conversions import Piece
from specdist.models.loading.packed_experts import fill_quantized
from specdist.models.quantized import quantized_linear
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products
from specdist.models.quantized.quantized_weights import LayerFormat, quantize
from specdist.models.recurrent.cuts import Cut

NUM_INPUTS = 48
NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Three layers that read the same."""

    def __init__(self, **form: Any) -> None:
        super().__init__()
        for seed, name in enumerate(NAMES):
            layer = QuantizedLinear(LayerFormat(rows=1, columns=None, **form), 32, NUM_INPUTS)
            layer = layer.to_empty(device="cpu")
            weight = torch.randn(32, NUM_INPUTS, generator=torch.Generator().manual_seed(seed))
            whole = replace(quantize(layer.form, weight), input_scale=torch.full((1,), 0.01 * (seed + 1)))
            fill_quantized(layer, Piece.whole("", weight.shape), whole)
            setattr(self, name, layer)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        return [getattr(self, name)(inputs) for name in NAMES]


def made(num_layers: int = 1, **form: Any) -> nn.ModuleList:
    model = nn.ModuleList(Attention(**form) for _ in range(num_layers))
    choose_products(model, torch.float32)
    return model


def alone(inputs: Tensor, **form: Any) -> list[Tensor]:
    """Every layer with an input of its own."""
    (model,) = made(**form)
    return [getattr(model, name)(inputs.clone()) for name in NAMES]


@pytest.fixture
def num_rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number that counts roundings."""
    counter, own = [0], quantized_linear.rounded_inputs

    def counted(*args: Any) -> Tensor:
        counter[0] += 1
        return own(*args)

    monkeypatch.setattr(quantized_linear, "rounded_inputs", counted)
    return counter


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("numbers", ["int8", "float8"])
def test_queries_keys_and_values_round_their_input_once(numbers: str, num_rounded: list[int]) -> None:
    form = {"numbers": numbers, "activations": "token"}
    first, second = made(2, **form)
    inputs = torch.randn(3, 5, NUM_INPUTS)
    expected = alone(inputs, **form)
    num_rounded[0] = 0
    assert same(first(inputs), expected) and num_rounded[0] == 1
    # Another module may have changed it in between, and this one's next pass may bring other numbers in it.
    inputs.mul_(-3.0)
    expected = alone(inputs, **form)
    num_rounded[0] = 0
    assert same(second(inputs), expected) and num_rounded[0] == 1
    inputs.add_(torch.randn(3, 5, NUM_INPUTS))
    assert same(second(inputs), alone(inputs, **form))


def test_stored_scales_are_each_layers_own(num_rounded: list[int]) -> None:
    form = {"numbers": "int8", "activations": "static"}
    (model,) = made(**form)
    inputs = torch.randn(5, NUM_INPUTS)
    expected = alone(inputs, **form)
    num_rounded[0] = 0
    assert same(model(inputs), expected) and num_rounded[0] == 3


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
