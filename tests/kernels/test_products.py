"""Products of few tokens: equal to float64, with the same bits in every run and whatever other tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels import products
from specdist.kernels.products import BLOCK_INPUTS, few_tokens_product, splits_of
from tests.kernels import plain

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
# Of the norm from float64: float32 sums, and one rounding of each number.
TOLERANCES = {FLOAT32: 1e-6, FLOAT16: 5e-4, BFLOAT16: 3e-3}
# More than the kernel takes for one block; a block of outputs and some, with splits that are not equal.
NUM_TOKENS, NUM_OUTPUTS, NUM_INPUTS = 21, 100, 5 * BLOCK_INPUTS + 48


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (30 * numbers if dtype == INT8 else numbers).to(dtype).to(device)


@pytest.mark.parametrize(
    ("kept", "inputs", "dtype", "rows", "columns"),
    [
        (FLOAT32, FLOAT32, FLOAT32, None, None), (BFLOAT16, BFLOAT16, BFLOAT16, None, None),
        (FLOAT16, FLOAT16, FLOAT16, None, None), (FLOAT8, FLOAT8, BFLOAT16, 1, None),
        (FLOAT8, BFLOAT16, BFLOAT16, None, None), (FLOAT8, FLOAT8, BFLOAT16, 64, BLOCK_INPUTS),
        (INT8, INT8, BFLOAT16, 1, 2 * BLOCK_INPUTS), (INT8, BFLOAT16, BFLOAT16, 1, None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_products_of_few_tokens_equal_float64(
    kept: torch.dtype, inputs: torch.dtype, dtype: torch.dtype, rows: int | None, columns: int | None,
    device: torch.device,
) -> None:  # fmt: skip
    """Tokens and weights are parts of wider rows. NaN stays in its token's outputs; a token has the same bits
    among other tokens, and again."""
    x = random(NUM_TOKENS, NUM_INPUTS + 16, dtype=inputs, device=device)[:, :NUM_INPUTS]
    weight = random(NUM_OUTPUTS, NUM_INPUTS + 32, dtype=kept, device=device, seed=1)[:, :NUM_INPUTS]
    bias, arrivals = (
        random(NUM_OUTPUTS, dtype=dtype, device=device, seed=2),
        torch.zeros(3, dtype=torch.int32),
    )
    scales = input_scales = None
    num_groups = -(-NUM_INPUTS // (columns or NUM_INPUTS))
    if kept.itemsize == 1:
        num_rows = -(-NUM_OUTPUTS // (rows or NUM_OUTPUTS))
        scales = random(num_rows, num_groups, dtype=FLOAT32, device=device, seed=3)
    if inputs.itemsize == 1:
        input_scales = random(NUM_TOKENS, num_groups, dtype=FLOAT32, device=device, seed=4)
        input_scales[3] = torch.nan
    else:
        x[3, 7] = torch.nan
    arrivals = arrivals.to(device)

    def product(
        own: slice | Tensor, operator: Callable[..., Tensor] = few_tokens_product, **options: Any
    ) -> Tensor:
        of_inputs = None if input_scales is None else input_scales[own]
        options = {"dtype": dtype, "rows": rows, "columns": columns} | options
        return operator(x[own], weight, bias, arrivals, scales, of_inputs, **options)

    found, exact = product(slice(None)), product(slice(None), plain.few_tokens_product, dtype=torch.float64)
    assert found.dtype == dtype and not arrivals.any()
    is_token = torch.arange(NUM_TOKENS, device=device) != 3
    assert found[3].isnan().all() and not found[is_token].isnan().any()
    assert (found - exact)[is_token].norm() <= TOLERANCES[dtype] * exact[is_token].norm()
    tokens = torch.arange(NUM_TOKENS, device=device)
    for own in (tokens, tokens.flip(0)):  # all others have moved, the middle one has not
        assert torch.equal(product(own)[10], found[10])
    # In float32 the interpreter's products depend on the place.
    assert dtype == FLOAT32 or torch.equal(product(tokens[10:11])[0], product(tokens[:16])[10])
    if input_scales is not None:  # of all tokens
        input_scales = input_scales[:1].clone()
    for gate in (0, 1, 2):
        exact = product(slice(3), plain.few_tokens_product, dtype=torch.float64, gate=gate)
        assert (product(slice(3), gate=gate) - exact).norm() <= 2 * TOLERANCES[dtype] * exact.norm()


@pytest.mark.parametrize(
    ("num_tokens", "width", "dtype", "is_gemma"),
    [
        (1, 150, BFLOAT16, False), (5, 150, FLOAT32, True), (6, 1030, BFLOAT16, True),
        (8, 64, FLOAT16, False), (64, 100, BFLOAT16, False), (17, 20, BFLOAT16, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_residual_and_norms_in_a_product_equal_float64(
    num_tokens: int, width: int, dtype: torch.dtype, is_gemma: bool, device: torch.device
) -> None:
    """Of rows that are parts of wider ones. NaN stays in its row; and the same bits again."""
    sizes = [(num_tokens, NUM_INPUTS), (num_tokens, width), (width, NUM_INPUTS)]
    x, residual, numbers = (
        random(rows, size + 16, dtype=dtype, device=device, seed=seed)[:, :size]
        for seed, (rows, size) in enumerate(sizes)
    )
    numbers = numbers / NUM_INPUTS**0.5
    before, weight, bias = (random(width, dtype=dtype, device=device, seed=seed) for seed in (3, 4, 5))
    x[1:2, 7], arrivals = torch.nan, torch.zeros(-(-width // 64) + 1, dtype=torch.int32, device=device)
    form = {"epsilon": 1e-5, "weight_offset": float(is_gemma), "rounds_first": not is_gemma}

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        rows = rows / (rows.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return rows * (form["weight_offset"] + weight.double())

    weights = {"weight_before_W": before if is_gemma else None, "weight_W": weight}
    found, again = (
        few_tokens_product(x, numbers, bias, arrivals, dtype=dtype, residual=residual, **weights, **form)
        for _ in range(2)
    )
    sums = x.double() @ numbers.double().T + bias.double()
    sums = residual.double() + (norm(sums, before) if is_gemma else sums)
    is_token = torch.arange(num_tokens, device=device) != 1
    assert torch.equal(found.isnan().all(2), ~is_token.expand(2, -1)) and not found[:, is_token].isnan().any()
    assert torch.equal(found.nan_to_num(9.0), again.nan_to_num(9.0)) and not arrivals.any()
    for mine, exact in zip(found, (sums, norm(sums, weight)), strict=True):
        assert (mine - exact)[is_token].norm() <= 2 * TOLERANCES[dtype] * exact[is_token].norm()


@pytest.mark.parametrize("num_multiprocessors", [108, 132, 148])
def test_matrices_are_split_for_the_whole_card(num_multiprocessors: int) -> None:
    """Those of a layer of 1B and 8B, and of 70B over four ranks: no split is empty, none is left out."""
    for num_outputs, num_inputs in (
        (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (28672, 4096),
        (4096, 14336), (2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168), (100, 100),
    ):  # fmt: skip
        num_splits, steps = splits_of(num_outputs, num_inputs, num_multiprocessors)
        num_steps = -(-num_inputs // BLOCK_INPUTS)
        assert (num_splits - 1) * steps < num_steps <= num_splits * steps
        programs = num_splits * -(-num_outputs // products.BLOCK_OUTPUTS)
        # Of 8 MB a program has two blocks, which are on their way at once.
        assert programs >= 2 * num_multiprocessors or steps == products.LEAST_STEPS


def test_what_the_kernel_does_not_take_is_refused(device: torch.device) -> None:
    weight = torch.ones(64, 256, dtype=INT8, device=device)
    arrivals, scales = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(64, 4, device=device)
    for num_tokens, numbers, columns in (
        (65, weight, None),
        (2, weight, 64),
        (2, weight.T.contiguous().T, None),
    ):
        x = torch.ones(num_tokens, 256, dtype=torch.bfloat16, device=device)
        with pytest.raises(ValueError, match="not for"):
            few_tokens_product(x, numbers, None, arrivals, scales, dtype=x.dtype, rows=1, columns=columns)
