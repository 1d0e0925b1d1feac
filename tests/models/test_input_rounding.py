"""What several quantised layers read is rounded once, and is what each of them would round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdist.models.quantized import quantized_linear
from specdist.models.quantized.quantized_linear import QuantizedLinear, choose_products
from specdist.models.quantized.quantized_weights import LayerFormat, quantize

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
            layer.fill(quantize(layer.form, weight), {"input_scale": torch.tensor(0.01 * (seed + 1))})
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


def test_nothing_is_rounded_for_layers_with_narrow_weights_alone(num_rounded: list[int]) -> None:
    (model,) = made(numbers="int8")
    num_rounded[0] = 0
    inputs = torch.randn(5, NUM_INPUTS)
    assert same(model(inputs), alone(inputs, numbers="int8")) and num_rounded[0] == 0
