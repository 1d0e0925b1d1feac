"""The small steps of a decoder layer, one kernel each: RMS norm, residual with the norms around it, gated
activation.

In plain operations they are 27 kernels of a Llama layer, most of which read and write the whole hidden state.
Numbers are rounded where those operations round them: products and sums of half precision are computed in
float32 and rounded one by one. A row's numbers do not depend on the other rows.

W width of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.peer_sums import summed_over_ranks

# Numbers that a program works on at once; a longer row of a norm is still one program.
BLOCK = 1024
# Numbers of a thread, so that a row of a norm stays in registers; with a residual there are two rows.
NUMBERS_PER_THREAD, NUMBERS_WITH_RESIDUAL = 32, 16
MAX_WARPS = 32
# A wider row would not stay in registers.
MAX_NORM_WIDTH = 32768
MAX_RESIDUAL_WIDTH = 16384
# Without contraction into fused multiply-adds sums and products round as in plain operations.
OPTIONS: dict[str, int | bool] = {"num_warps": 4, "enable_fp_fusion": False}
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(numbers, dtype: tl.constexpr):
    """float32 numbers as the dtype holds them, the nearest and of two the even one, in float32. The
    interpreter cuts bfloat16 off: there the bits are rounded before."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        numbers = (bits + (0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return numbers.to(dtype).to(tl.float32)


@triton.jit
def _normed(
    numbers, weight, columns_W, epsilon, width: tl.constexpr, weight_offset: tl.constexpr,
    rounds_first: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """RMS norms of float32 rows [M, W], which are 0 beyond their width."""
    means_M = tl.sum(numbers * numbers, 1) / width
    numbers = numbers * tl.rsqrt(means_M + epsilon)[:, None]
    if rounds_first:
        numbers = _rounded(numbers, dtype)
    weights_W = tl.load(weight + columns_W, mask=columns_W < width, other=0.0).to(tl.float32)
    if weight_offset != 0:
        weights_W = weight_offset + weights_W
    return _rounded(weights_W[None, :] * numbers, dtype)


# Numbers that change from pass to pass compile nothing anew.
@triton.jit(do_not_specialize=["num_rows", "num_inner"])
def rms_norm_kernel(
    inputs, weight, output, num_rows, num_inner, stride_outer, stride_row, epsilon, width: tl.constexpr,
    weight_offset: tl.constexpr, rounds_first: tl.constexpr, block_rows: tl.constexpr,
    block_width: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows,). ``num_inner`` rows follow one another, as the heads of a token do."""
    rows_M = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns_W = tl.arange(0, block_width)
    is_used = (rows_M < num_rows)[:, None] & (columns_W < width)[None, :]
    places_M = (rows_M // num_inner).to(tl.int64) * stride_outer + (rows_M % num_inner) * stride_row
    loaded = tl.load(inputs + places_M[:, None] + columns_W[None, :], mask=is_used, other=0.0)
    numbers = _normed(
        loaded.to(tl.float32), weight, columns_W, epsilon, width, weight_offset, rounds_first, loaded.dtype
    )
    places_M = rows_M.to(tl.int64) * width
    tl.store(output + places_M[:, None] + columns_W[None, :], numbers, mask=is_used)


@triton.jit(do_not_specialize=["num_rows", "rank", "most_waits"])
def residual_norm_kernel(
    inputs, residual, weight_before, weight, sums, output, peers, turns, num_rows, rank, most_waits,
    epsilon, width: tl.constexpr, weight_offset: tl.constexpr, rounds_first: tl.constexpr,
    is_normed_before: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
    num_ranks: tl.constexpr, block_ranks: tl.constexpr, half: tl.constexpr, block=None,
):  # fmt: skip
    """Grid: (blocks of rows,), unless it is called for a block. With several ranks the inputs are terms of a
    sum over them."""
    if block is None:
        block = tl.program_id(0)
    rows_M = block * block_rows + tl.arange(0, block_rows)
    columns_W = tl.arange(0, block_width)
    is_used = (rows_M < num_rows)[:, None] & (columns_W < width)[None, :]
    places = rows_M.to(tl.int64)[:, None] * width + columns_W[None, :]
    loaded = tl.load(inputs + places, mask=is_used, other=0.0)
    numbers = loaded.to(tl.float32)
    if num_ranks > 1:
        numbers = summed_over_ranks(
            loaded, places, is_used, peers, turns, rank, most_waits, num_ranks, block_ranks, half
        )
        numbers = _rounded(numbers, loaded.dtype)
    if is_normed_before:
        numbers = _normed(
            numbers, weight_before, columns_W, epsilon, width, weight_offset, rounds_first, loaded.dtype
        )
    numbers += tl.load(residual + places, mask=is_used, other=0.0).to(tl.float32)
    numbers = _rounded(numbers, loaded.dtype)
    tl.store(sums + places, numbers, mask=is_used)
    numbers = _normed(numbers, weight, columns_W, epsilon, width, weight_offset, rounds_first, loaded.dtype)
    tl.store(output + places, numbers, mask=is_used)


@triton.jit
def gated(gates, ups, is_tanh: tl.constexpr, dtype: tl.constexpr):
    """float32: SiLU(gates) × ups, or the approximation of GELU by tanh, each step rounded to the dtype."""
    # 1/2 (1 + tanh(x)) is the logistic function of 2x.
    slopes = gates
    if is_tanh:
        slopes = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    return _rounded(_rounded(gates / (1.0 + tl.exp(-slopes)), dtype) * ups, dtype)


@triton.jit
def gate_kernel(
    gates, ups, output, stride_gate, stride_up, width: tl.constexpr, is_tanh: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of a row)."""
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_used = columns < width
    row = tl.program_id(0).to(tl.int64)
    loaded = tl.load(gates + row * stride_gate + columns, mask=is_used, other=0.0)
    up = tl.load(ups + row * stride_up + columns, mask=is_used, other=0.0).to(tl.float32)
    numbers = gated(loaded.to(tl.float32), up, is_tanh, loaded.dtype)
    tl.store(output + row * width + columns, numbers, mask=is_used)


@torch.library.custom_op("specdist::rms_norm", mutates_args=())
def rms_norm(
    inputs: Tensor, weight_W: Tensor, *, epsilon: float, weight_offset: float, rounds_first: bool
) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) × (weight_offset + weight), in float32: the shape of the inputs [..., W].

    Args:
        weight_offset: 0, or 1 as in Gemma.
        rounds_first: the normalised numbers are rounded to the dtype before they are multiplied.

    Raises:
        ValueError: if a row is wider than ``MAX_NORM_WIDTH``.
    """
    width = inputs.shape[-1]
    if width > MAX_NORM_WIDTH:
        raise ValueError(f"a norm of {width} numbers; {MAX_NORM_WIDTH} fit into a program")
    num_inner = 1 if inputs.is_contiguous() or inputs.dim() < 3 else inputs.shape[-2]
    rows_LMW = inputs.reshape(-1, num_inner, width)
    if rows_LMW.stride(2) != 1:
        rows_LMW = rows_LMW.contiguous()
    output = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    options, num_rows = norm_constants(width), inputs.numel() // width
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, options["block_rows"]),)](
            rows_LMW, weight_W, output, num_rows, num_inner, *rows_LMW.stride()[:2], epsilon,
            width=width, weight_offset=weight_offset, rounds_first=rounds_first,
            **options, **norm_options(width),
        )  # fmt: skip
    return output


@torch.library.custom_op("specdist::residual_norm", mutates_args=("turns",))
def residual_norm(
    inputs: Tensor,
    residual: Tensor,
    weight_before_W: Tensor | None,
    weight_W: Tensor,
    peers_N: Tensor | None = None,
    turns: Tensor | None = None,
    *,
    epsilon: float,
    weight_offset: float,
    rounds_first: bool,
    rank: int = 0,
    half: int = 0,
    most_waits: int = 0,
) -> tuple[Tensor, Tensor]:
    """The sum of residual and inputs, [..., W] both, and its norm; both have the inputs' shape.

    Args:
        weight_before_W: of a norm of the inputs, before they are added; None for none.
        epsilon, weight_offset, rounds_first: of both norms, as of :func:`rms_norm`.
        peers_N: int64, addresses of the ranks' memory, over whose inputs is summed first, a collective: see
            :mod:`specdist.kernels.peer_sums`. ``turns``: int64 of this rank, one for each row; ``half``: of
            the memory, in numbers, a multiple of 16; ``most_waits``: looks for the peers' signals.

    Raises:
        ValueError: if a row is wider than ``MAX_RESIDUAL_WIDTH``.
    """
    return run_residual_norm(
        residual_norm_kernel, inputs, residual, weight_before_W, weight_W, peers_N, turns, rank=rank,
        half=half, most_waits=most_waits, epsilon=epsilon, weight_offset=weight_offset,
        rounds_first=rounds_first,
    )  # fmt: skip


def run_residual_norm(
    kernel: Any, inputs: Tensor, residual: Tensor, weight_before_W: Tensor | None, weight_W: Tensor,
    peers_N: Tensor | None, turns: Tensor | None, *, rank: int, half: int, most_waits: int,
    most_programs: int = 2**31 - 1, **form: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One of the kernels of :func:`residual_norm`, with so many programs at most."""
    width, num_ranks = inputs.shape[-1], 1 if peers_N is None else len(peers_N) - 1
    if width > MAX_RESIDUAL_WIDTH:
        raise ValueError(f"a residual of {width} numbers; {MAX_RESIDUAL_WIDTH} fit into a program")
    inputs, residual = inputs.contiguous(), residual.contiguous()
    sums, output = torch.empty_like(inputs), torch.empty_like(inputs)
    options = norm_constants(width)
    num_rows = inputs.numel() // width
    if num_rows:
        weight_before = weight_W if weight_before_W is None else weight_before_W
        kernel[(min(most_programs, triton.cdiv(num_rows, options["block_rows"])),)](
            inputs, residual, weight_before, weight_W, sums, output, peers_N, turns, num_rows, rank,
            most_waits, width=width, is_normed_before=weight_before_W is not None, num_ranks=num_ranks,
            block_ranks=triton.next_power_of_2(num_ranks), half=half, **form,
            **options, **norm_options(width, NUMBERS_WITH_RESIDUAL),
        )  # fmt: skip
    return sums, output


@torch.library.custom_op("specdist::gated_activation", mutates_args=())
def gated_activation(gates: Tensor, ups: Tensor, *, is_tanh: bool) -> Tensor:
    """SiLU(gates) × ups, or GELU (by tanh) of the gates × ups; both of one shape and dtype."""
    width = gates.shape[-1]
    output = torch.empty_like(gates, memory_format=torch.contiguous_format)
    gates_MW, ups_MW = (
        each if each.stride(1) == 1 else each.contiguous()
        for each in (gates.reshape(-1, width), ups.reshape(-1, width))
    )
    if gates.numel():
        gate_kernel[(len(gates_MW), triton.cdiv(width, BLOCK))](
            gates_MW, ups_MW, output, gates_MW.stride(0), ups_MW.stride(0), width=width, is_tanh=is_tanh,
            block=BLOCK, **OPTIONS,
        )  # fmt: skip
    return output


def norm_constants(width: int, block: int = BLOCK) -> dict[str, int]:
    """The block of a norm's program: one row, or several narrow ones, such as heads."""
    block_width = triton.next_power_of_2(width)
    return {"block_rows": max(1, block // block_width), "block_width": block_width}


def norm_options(width: int, numbers_per_thread: int = NUMBERS_PER_THREAD) -> dict[str, int | bool]:
    """How to compile a norm, so that a program's rows stay in registers."""
    num_numbers = max(BLOCK, triton.next_power_of_2(width))
    return OPTIONS | {"num_warps": min(MAX_WARPS, max(4, num_numbers // numbers_per_thread // 32))}
