"""Quantised matrices: what is stored means the matrix that it was made from, and so do its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdist.models.files.checkpoint import Checkpoint
from specdist.models.quantized.quantized import quantization_of, requested_format
from specdist.models.quantized.quantized_weights import LayerFormat, QuantizedWeight, from_stored, quantize
from tests.models.families import tiny_model
from tests.models.quantized_checkpoints import LAYOUTS

NUM_OUTPUTS, NUM_INPUTS = 96, 128


def matrix() -> Tensor:
    """Rows and columns of very different sizes, and not around zero: another's scale or zero is noticed."""
    generator = torch.Generator().manual_seed(7)
    rows, columns = (
        torch.rand(NUM_OUTPUTS, 1, generator=generator),
        torch.rand(NUM_INPUTS, generator=generator),
    )
    return (torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator) + 1) * (rows + 0.1) * (columns + 0.1)


def declared_format(layout: str) -> LayerFormat:
    config = tiny_model("llama").config
    config.quantization_config = LAYOUTS[layout][0]
    checkpoint = Checkpoint(option="--target", name="it", folder=Path("it"), config=config, weight_files=())
    quantization = quantization_of(checkpoint)
    assert quantization is not None
    form = quantization.format_of("model.layers.1.mlp.up_proj", NUM_INPUTS)
    assert form is not None
    return form


def check_rounding(weight: QuantizedWeight, expected: Tensor) -> None:
    """No number is further from its own than rounding explains: half a step, or of FP8 a sixteenth."""
    form = weight.form
    scales = 2.0 ** (weight.scales_AB.float() - 127) if form.has_powers else weight.scales_AB
    for dim, shared in enumerate((form.rows, form.columns)):
        if shared:
            scales = scales.repeat_interleave(shared, dim)
    error = (weight.dequantized(torch.float32) - expected).abs()
    step = 0.5 if form.numbers != "float8" else 2.0**-9
    # At the ends of the range a number is clamped, and a rounded zero point moves it.
    allowed = scales * (step * 2.1) + (expected.abs() / 15 if form.numbers == "float8" else 0)
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_parts_mean_the_matrix(layout: str) -> None:
    form, weight = declared_format(layout), matrix()
    parts = LAYOUTS[layout][1](weight)
    stored = form.stored_shapes(NUM_OUTPUTS, NUM_INPUTS)
    assert {name: parts[name].shape for name in stored} == stored
    found = from_stored(form, parts, (NUM_OUTPUTS, NUM_INPUTS))
    check_rounding(found, weight)
    sizes = [each for each in (found.numbers, found.scales_AB, found.zeros_AB) if each is not None]
    assert form.num_bytes(NUM_OUTPUTS, NUM_INPUTS) == sum(each.nbytes for each in sizes)


@pytest.mark.parametrize("request_", ["int8", "float8", "int4"])
def test_a_matrix_is_quantised_while_it_is_loaded(request_: str) -> None:
    form = requested_format(request_, NUM_INPUTS)
    assert form is not None
    check_rounding(quantize(form, matrix()), matrix())
    # A row of zeros has no range.
    assert not quantize(form, torch.zeros(2, NUM_INPUTS)).dequantized(torch.float32).any()
    assert requested_format("int4", 60) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_has_its_own_scales(layout: str, dim: int) -> None:
    form = declared_format(layout)
    whole = from_stored(form, LAYOUTS[layout][1](matrix()), (NUM_OUTPUTS, NUM_INPUTS))
    expected = whole.dequantized(torch.float32)
    for start, stop in ((0, 32), (32, 96), (64, 96)):
        found = whole.cut(dim, start, stop).dequantized(torch.float32)
        assert torch.equal(found, expected.narrow(dim, start, stop - start))
    border = form.border(dim)
    if border > 1:
        with pytest.raises(ValueError, match=f"not a multiple of {border}"):
            whole.cut(dim, border // 2, border)
