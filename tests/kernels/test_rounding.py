"""Rows rounded to 8 bits by one kernel: to the nearest numbers, a tie to the even one, each row alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import rounding
from specdist.kernels.layers import MAX_NORM_WIDTH
from specdist.kernels.rounding import rounded_rows
from specdist.models.quantized.input_rounding import check_kernel
from specdist.models.quantized.quantized_weights import LayerFormat

LIMITS = {"float8": 448.0, "int8": 127.5}


def options_of(numbers: str) -> dict[str, Any]:
    return {"limit": LIMITS[numbers], "is_float8": numbers == "float8"}


def exactly(inputs: Tensor, numbers: str, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """By float64, whose quotients fit between those of float32: values and scales."""
    scales = inputs.double().abs().amax(-1, keepdim=True) / LIMITS[numbers]
    scales = scales.float().clamp_min(torch.finfo(torch.float32).tiny).double()
    scales = scales if scale is None else torch.full_like(scales, scale).float().double()
    values = (inputs.double() / scales).float().double().clamp(-LIMITS[numbers], LIMITS[numbers])
    if numbers == "int8":
        return values.round().clamp(-128, 127), scales
    # Steps of a sixteenth of the power of two above, and none smaller than 2^-9.
    steps = 2.0 ** (values.abs().clamp_min(2.0**-6).log2().floor() - 3)
    return (values / steps).round() * steps, scales


def same(found: tuple[Tensor, Tensor], inputs: Tensor, numbers: str, scale: float | None = None) -> None:
    values, scales = exactly(inputs.reshape(-1, inputs.shape[-1]), numbers, scale)
    assert found[0].dtype == (torch.float8_e4m3fn if numbers == "float8" else torch.int8)
    torch.testing.assert_close(found[0].double(), values, rtol=0, atol=0, equal_nan=numbers == "float8")
    torch.testing.assert_close(found[1].double(), scales, rtol=0, atol=0, equal_nan=True)


def rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Of very different sizes in a row, so that many are subnormal, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(num_rows, width, generator=generator)
    found *= 10 ** (3 * torch.rand(num_rows, width, generator=generator) - 2)
    found[num_rows // 2] = 0
    return found.to(device, dtype)


@pytest.mark.parametrize(
    ("numbers", "dtype", "num_rows", "width"),
    [
        ("float8", torch.bfloat16, 9, 100),
        ("float8", torch.float32, 3, 1500),
        ("int8", torch.bfloat16, 3, 1500),
    ],
)  # fmt: skip
def test_rows_are_rounded_to_the_nearest(
    numbers: str, dtype: torch.dtype, num_rows: int, width: int, device: torch.device
) -> None:
    inputs = rows(num_rows, width, dtype, device)
    same(rounded_rows(inputs, **options_of(numbers)), inputs, numbers)
    # As a part of a wider tensor.
    strided = torch.cat([inputs, inputs], dim=1)[:, :width]
    same(rounded_rows(strided, **options_of(numbers)), inputs, numbers)
    # A stored scale, for which the largest are too large.
    scale = 0.3 * float(inputs.abs().max()) / LIMITS[numbers]
    same(rounded_rows(inputs, **options_of(numbers), scale=scale), inputs, numbers, scale)


def test_every_float8_and_every_middle_between_two(device: torch.device) -> None:
    """Of two the even one, as torch casts them."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([middles.nextafter(torch.zeros(1)), middles.nextafter(torch.ones(1) * 1e9)])
    inputs = torch.cat([codes, -codes, middles, -middles, near])[None].to(device)
    found, scales = rounded_rows(inputs, **options_of("float8"))
    assert float(scales) == 1
    assert torch.equal(found.float(), inputs.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("numbers", LIMITS)
def test_what_is_not_finite_stays_in_its_row(numbers: str, device: torch.device) -> None:
    inputs = rows(5, 64, torch.float32, device)
    expected = rounded_rows(inputs, **options_of(numbers))
    inputs[1, 3], inputs[3, 60] = torch.nan, torch.inf
    # Also where integers have no NaN, and a scale is stored.
    assert rounded_rows(inputs, **options_of(numbers), scale=1.0)[1].isnan().flatten().tolist() == [
        0,
        1,
        0,
        0,
        0,
    ]
    found = rounded_rows(inputs, **options_of(numbers))
    assert found[1][1].isnan() and found[1][3].isinf()
    assert torch.equal(found[1][[0, 2, 4]], expected[1][[0, 2, 4]])
    assert torch.equal(found[0].float()[[0, 2, 4]], expected[0].float()[[0, 2, 4]])
    if numbers == "float8":
        assert found[0][1].isnan().all() and found[0][3].isnan().sum() == 1


@pytest.mark.parametrize(
    ("numbers", "fault"), [("float8", ""), ("int8", ""), ("int8", "scales"), ("float8", "numbers")]
)
def test_a_kernel_that_rounds_otherwise_is_not_used(
    numbers: Any, fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = LayerFormat(numbers=numbers, rows=1, columns=None, activations="token")

    def faulty(inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        found, scales = rounded_rows(inputs, **options)
        return (found.roll(1, 0), scales) if fault == "numbers" else (found, 1.01 * scales)

    if fault:
        monkeypatch.setattr(rounding, "rounded_rows", faulty)
    with pytest.raises(ValueError, match=f"{fault} of tokens differ") if fault else contextlib.nullcontext():
        check_kernel(form, device, torch.bfloat16, 100)


def test_rows_that_do_not_fit_and_none_at_all(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows of 32769 numbers"):
        rounded_rows(torch.zeros(1, MAX_NORM_WIDTH + 1, device=device), **options_of("int8"))
    found, scales = rounded_rows(torch.zeros(0, 16, device=device), **options_of("float8"))
    assert found.shape == (0, 16) and scales.shape == (0, 1)
