"""Rows rounded to numbers of 8 bits, each with a scale of its own or a stored one, for products of such
numbers.

In plain operations that is six kernels for float8 and seven for int8: the largest number, its share of the
format's, a least scale, the quotients, their limits, and the cast. Here it is one. float8 is encoded by
integer operations, which every GPU has, and Triton's interpreter, too.

M rows, W width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.layers import MAX_NORM_WIDTH, norm_constants, norm_options

# The least normal number of float32: of a row of zeros any scale will do.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def float8_bits(values):
    """The bits of the nearest E4M3 numbers, and of two the even ones; of at most 448."""
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    # Three bits of the fraction stay, and the exponent counts from -7, not -127.
    normal = ((magnitudes + 0x7FFFF + ((magnitudes >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 in steps of 2^-9, which are the last places of numbers from 2^14 on.
    small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitudes < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(values == values, codes, 0x7F)


@triton.jit
def _int8(values):
    """The nearest integers, and of two the even ones. From 1.5 x 2^23 on numbers are whole."""
    integers = (values + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(integers, -128.0), 127.0).to(tl.int32)


# Numbers that change from pass to pass compile nothing anew.
@triton.jit(do_not_specialize=["num_rows"])
def round_kernel(
    inputs, narrow, scales, num_rows, stride_row, limit, scale, width: tl.constexpr, is_float8: tl.constexpr,
    has_scale: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows,)."""
    rows_M = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    columns_W = tl.arange(0, block_width)
    is_used = (rows_M < num_rows)[:, None] & (columns_W < width)[None, :]
    places = rows_M.to(tl.int64)[:, None] * stride_row + columns_W[None, :]
    numbers = tl.load(inputs + places, mask=is_used, other=0.0).to(tl.float32)
    if has_scale:
        scales_M = tl.zeros([block_rows], tl.float32) + scale
    else:
        scales_M = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), limit), TINY)
    # A maximum may hide NaN.
    num_nan_M = tl.sum((numbers != numbers).to(tl.int32), 1)
    scales_M = tl.where(num_nan_M > 0, float("nan"), scales_M)
    tl.store(scales + rows_M, scales_M, mask=rows_M < num_rows)
    values = tl.div_rn(numbers, tl.broadcast_to(scales_M[:, None], numbers.shape))
    # A stored scale may be too small for some; a comparison with NaN is not true.
    values = tl.where(tl.abs(values) > limit, tl.where(values > 0, limit, -limit), values)
    codes = float8_bits(values) if is_float8 else _int8(values)
    tl.store(narrow + rows_M.to(tl.int64)[:, None] * width + columns_W[None, :], codes, mask=is_used)


@torch.library.custom_op("specdist::rounded_rows", mutates_args=())
def rounded_rows(
    inputs_MW: Tensor, *, limit: float, is_float8: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers of float8 (E4M3) or int8 [M, W], and float32 scales [M, 1]: the one that is given, or a row's
    largest over the limit.

    Raises:
        ValueError: if a row is wider than ``MAX_NORM_WIDTH``.
    """
    num_rows, width = inputs_MW.shape
    if width > MAX_NORM_WIDTH:
        raise ValueError(f"rows of {width} numbers; {MAX_NORM_WIDTH} fit into a program")
    if inputs_MW.stride(1) != 1:
        inputs_MW = inputs_MW.contiguous()
    narrow = inputs_MW.new_empty(num_rows, width, dtype=torch.uint8 if is_float8 else torch.int8)
    scales = inputs_MW.new_empty(num_rows, 1, dtype=torch.float32)
    options = norm_constants(width)
    if num_rows:
        round_kernel[(triton.cdiv(num_rows, options["block_rows"]),)](
            inputs_MW,
            narrow,
            scales,
            num_rows,
            inputs_MW.stride(0),
            limit,
            0.0 if scale is None else scale,
            width=width,
            is_float8=is_float8,
            has_scale=scale is not None,
            **options,
            **norm_options(width),
        )
    return narrow.view(torch.float8_e4m3fn) if is_float8 else narrow, scales
