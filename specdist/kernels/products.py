"""Products of few tokens with a matrix, x · Wᵀ, whose time is that of reading it once.

A program has a block of outputs and a part of the inputs (a split), so that there are two for every
multiprocessor, and streams its weights through stages of shared memory. It leaves its sums in memory; of the
programs of a block the last to come adds them, from the first split to the last: the same bits in every run.
The last of all blocks may do the residual and norms that follow.
Splits depend on the matrix and the device alone, so that other tokens change nothing.

Weights, and inputs, of 8 bits are multiplied as the 16-bit numbers that hold them, and sums by their scales.

T tokens, N outputs, K inputs, A × B scales of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.float8_cache import readable
from specdist.kernels.layers import _rounded, gated, norm_constants, residual_norm_kernel
from specdist.kernels.paged_attention import _dot

MAX_TOKENS, LEAST_BLOCK_TOKENS, BLOCK_OUTPUTS, BLOCK_INPUTS = 64, 16, 64, 128
# What a multiprocessor runs at a time (of an interpreter's four), and the least blocks of inputs of a split.
PROGRAMS_PER_MULTIPROCESSOR, HOST_MULTIPROCESSORS, LEAST_STEPS = 2, 4, 2
# Numbers of rows that are normed at a time: they stay in the registers of a program.
NORMED_NUMBERS = 8192
# Blocks of weights in shared memory, by bytes of a number.
STAGES = {1: 5, 2: 4, 4: 3}


@triton.jit
def _widened(narrow, dtype: tl.constexpr):
    """Numbers of 8 bits, or bits of float8, as they are."""
    if narrow.dtype == tl.uint8:
        # Shifted, the bits are those of a float16 that is smaller by a power of two.
        bits = narrow.to(tl.int16)
        narrow = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True) * 256.0
    return narrow.to(tl.float16).to(dtype)


@triton.jit
def _scaled(sums, scales, input_scales, places_N, places_T, is_token_T):
    sums *= tl.load(scales + places_N)[:, None]
    if input_scales is not None:
        sums *= tl.load(input_scales + places_T, mask=is_token_T, other=0.0)[None, :]
    return sums


# Numbers that change from pass to pass, or from matrix to matrix, compile nothing anew.
@triton.jit(do_not_specialize=["num_tokens", "num_splits", "split_steps"])
def few_tokens_kernel(
    inputs, numbers, bias, scales, input_scales, output, partials, arrivals, num_tokens, num_outputs,
    num_inputs, num_splits, split_steps, stride_token, stride_row, stride_scale, stride_input_scale,
    residual, weight_before, weight, epsilon, rows: tl.constexpr, columns: tl.constexpr, gate: tl.constexpr,
    weight_offset: tl.constexpr, rounds_first: tl.constexpr, block_tokens: tl.constexpr,
    block_outputs: tl.constexpr, block_inputs: tl.constexpr, width: tl.constexpr, block_width: tl.constexpr,
    block_rows: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of outputs, splits). ``rows`` and ``columns``: that share a scale, 0 for all; ``gate``:
    1 for SiLU and 2 for GELU of the first half of the matrix, times the second: their rows take turns.
    ``width``: of what is normed, all outputs of a token; their sums and norms follow them in memory."""
    block, split = tl.program_id(0), tl.program_id(1)
    tokens_T, own_N = tl.arange(0, block_tokens), tl.arange(0, block_outputs)
    parts: tl.constexpr = 2 if gate > 0 else 1
    is_token_T = tokens_T < num_tokens
    is_token = is_token_T[None, :]
    # In the place of rows beyond the last others are read again.
    rows_N = (block * (block_outputs // parts) + own_N // parts) % num_outputs + own_N % parts * num_outputs
    from_inputs = inputs + tokens_T.to(tl.int64)[None, :] * stride_token
    from_numbers = numbers + rows_N.to(tl.int64)[:, None] * stride_row
    places_N = rows_N // rows * stride_scale if rows > 0 else rows_N * 0
    places_T = tokens_T * stride_input_scale
    is_narrow: tl.constexpr = inputs.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if is_narrow else inputs.dtype.element_ty
    nothing = tl.zeros((block_outputs, block_tokens), tl.float32)
    sums = nothing
    end = tl.minimum((split + 1) * split_steps, tl.cdiv(num_inputs, block_inputs))
    for step in range(split * split_steps, end):
        inputs_K = step * block_inputs + tl.arange(0, block_inputs)
        is_input = inputs_K < num_inputs
        weights = tl.load(from_numbers + inputs_K[None, :], mask=is_input[None, :], other=0.0)
        x_KT = tl.load(from_inputs + inputs_K[:, None], mask=is_input[:, None] & is_token, other=0.0)
        if weights.dtype != dtype:
            weights = _widened(weights, dtype)
        if is_narrow:
            x_KT = _widened(x_KT, dtype)
        if columns == 0:
            sums = _dot(weights, x_KT, sums)
        else:
            group = step * block_inputs // columns
            terms = _dot(weights, x_KT, nothing)
            sums += _scaled(terms, scales, input_scales, places_N + group, places_T + group, is_token_T)
    is_last = True
    if num_splits > 1:
        size: tl.constexpr = block_tokens * block_outputs
        places = tokens_T[None, :] * block_outputs + own_N[:, None]
        own = partials + block.to(tl.int64) * num_splits * size + places
        tl.store(own + split * size, sums, mask=is_token)
        tl.debug_barrier()  # all threads have written before one of them says so
        is_last = tl.atomic_add(arrivals + block, 1, sem="acq_rel") == num_splits - 1
        if is_last:
            tl.debug_barrier()
            tl.store(arrivals + block, 0)  # for the next launch
            sums = nothing
            for each in range(num_splits):
                sums += tl.load(own + each * size, mask=is_token, other=0.0, cache_modifier=".cg")
    if is_last:
        if columns == 0 and scales is not None:
            sums = _scaled(sums, scales, input_scales, places_N, places_T, is_token_T)
        if bias is not None:
            sums += tl.load(bias + rows_N).to(tl.float32)[:, None]
        kept: tl.constexpr = output.dtype.element_ty
        numbers_NT = _rounded(sums, kept)
        if gate > 0:
            pairs = tl.permute(tl.reshape(numbers_NT, (block_outputs // 2, 2, block_tokens)), (0, 2, 1))
            gates, ups = tl.split(pairs)
            numbers_NT = gated(gates, ups, gate == 2, kept)
        outputs_N = block * (block_outputs // parts) + tl.arange(0, block_outputs // parts)
        to_output = output + tokens_T.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
        tl.store(to_output, numbers_NT, mask=(outputs_N < num_outputs)[:, None] & is_token)
        if width > 0:
            num_blocks = tl.num_programs(0)
            tl.debug_barrier()
            if tl.atomic_add(arrivals + num_blocks, 1, sem="acq_rel") == num_blocks - 1:
                tl.debug_barrier()
                tl.store(arrivals + num_blocks, 0)
                size = num_tokens * width
                for tokens in range(tl.cdiv(num_tokens, block_rows)):
                    residual_norm_kernel(
                        output, residual, weight_before, weight, output + size, output + 2 * size, None, None,
                        num_tokens, 0, 0, epsilon, width, weight_offset, rounds_first,
                        weight_before is not None, block_rows, block_width, 1, 1, 0, tokens,
                    )  # fmt: skip


def splits_of(num_outputs: int, num_inputs: int, num_multiprocessors: int) -> tuple[int, int]:
    """How many splits there are, and blocks of inputs of each."""
    num_steps = triton.cdiv(num_inputs, BLOCK_INPUTS)
    num_programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    wanted = triton.cdiv(num_programs, triton.cdiv(num_outputs, BLOCK_OUTPUTS))
    steps = max(LEAST_STEPS, num_steps // wanted)
    return triton.cdiv(num_steps, steps), steps


@torch.library.custom_op("specdist::few_tokens_product", mutates_args=("arrivals",))
def few_tokens_product(
    inputs_TK: Tensor, numbers_NK: Tensor, bias_N: Tensor | None, arrivals: Tensor,
    scales_AB: Tensor | None = None, input_scales: Tensor | None = None, residual: Tensor | None = None,
    weight_before_W: Tensor | None = None, weight_W: Tensor | None = None, *, dtype: torch.dtype,
    rows: int | None = None, columns: int | None = None, gate: int = 0, epsilon: float = 0.0,
    weight_offset: float = 0.0, rounds_first: bool = False,
) -> Tensor:  # fmt: skip
    """[T, N] in this dtype, which is that of the weights and inputs that are not of 8 bits. With a residual
    [2, T, N]: what :func:`specdist.kernels.layers.residual_norm` makes of it.

    Args:
        arrivals: int32, zeros before and after, one more than blocks of outputs; of one launch at a time.
        scales_AB: float32, each of ``rows`` × ``columns`` weights, None for all; ``input_scales``: [T, B], or
            of all tokens [1, 1].
        gate: of the kernel; then [T, N / 2].

    Raises:
        ValueError: for more than ``MAX_TOKENS`` tokens, columns of no whole blocks, or strides within rows.
    """
    (num_tokens, num_inputs), num_rows = inputs_TK.shape, len(numbers_NK)
    if num_tokens > MAX_TOKENS or (columns or 0) % BLOCK_INPUTS or numbers_NK.stride(1) != 1:
        raise ValueError(f"not for {num_tokens} tokens, {columns} columns, strides {numbers_NK.stride()}")
    inputs_TK, numbers_NK = (
        readable(each.view(torch.uint8)) if each.dtype == torch.float8_e4m3fn else each
        for each in (inputs_TK if inputs_TK.stride(1) == 1 else inputs_TK.contiguous(), numbers_NK)
    )
    number = HOST_MULTIPROCESSORS
    if inputs_TK.is_cuda:
        number = torch.cuda.get_device_properties(inputs_TK.device).multi_processor_count
    num_splits, split_steps = splits_of(num_rows, num_inputs, number)
    num_outputs = num_rows // 2 if gate else num_rows
    num_blocks, is_normed = triton.cdiv(num_rows, BLOCK_OUTPUTS), residual is not None
    options = constants(num_tokens, num_outputs * is_normed)
    output = inputs_TK.new_empty(3 if is_normed else 1, num_tokens, num_outputs, dtype=dtype)
    num_sums = num_splits * num_blocks * BLOCK_OUTPUTS * options["block_tokens"]
    partials = inputs_TK.new_empty(num_sums if num_splits > 1 else 0, dtype=torch.float32)
    if num_tokens:
        few_tokens_kernel[(num_blocks, num_splits)](
            inputs_TK, numbers_NK, bias_N, scales_AB, input_scales, output, partials, arrivals, num_tokens,
            num_outputs, num_inputs, num_splits, split_steps, inputs_TK.stride(0), numbers_NK.stride(0),
            0 if scales_AB is None else scales_AB.shape[1],
            0 if input_scales is None or len(input_scales) == 1 else input_scales.stride(0),
            None if residual is None else residual.contiguous(), weight_before_W, weight_W, epsilon,
            rows=rows or 0, columns=columns or 0, gate=gate, weight_offset=weight_offset,
            rounds_first=rounds_first, num_stages=STAGES[numbers_NK.itemsize], **options,
        )  # fmt: skip
    return output[1:] if is_normed else output[0]


def constants(num_tokens: int, width: int = 0) -> dict[str, int]:
    """The blocks of a program for so many tokens, whose outputs of this width are normed."""
    block_tokens = max(LEAST_BLOCK_TOKENS, triton.next_power_of_2(num_tokens))
    blocks = {"block_tokens": block_tokens, "block_outputs": BLOCK_OUTPUTS, "block_inputs": BLOCK_INPUTS}
    return {**blocks, "width": width, **norm_constants(max(1, width), NORMED_NUMBERS)}
