"""Keys and values of the cache in 8 bits, float8_e4m3fn with a scale of each token and head: their scales,
and what other kernels make of them.

Older GPUs than those of compute capability 8.9 have no instructions for float8. They are given its bits, of
which plain operations make the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.layers import _rounded

LARGEST = tl.constexpr(448.0)
FIRST_CAPABILITY = (8, 9)


@triton.jit
def of_bits(codes):
    """float32 of the bits of float8 numbers."""
    bits = codes.to(tl.int16)
    # Shifted, they are those of a float16 that is smaller by a power of two.
    return ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def plain_numbers(narrow, dtype: tl.constexpr):
    """Of float8 numbers, or of their bits: every dtype holds them as they are."""
    numbers = of_bits(narrow) if narrow.dtype == tl.uint8 else narrow.to(tl.float32)
    return numbers.to(dtype)


@triton.jit
def head_scales(first, second):
    """float32 [M], numbers of bfloat16: scales of heads whose halves these are."""
    # A maximum may hide NaN.
    largest = tl.maximum(
        tl.max(tl.where(first == first, tl.abs(first), float("inf")), 1),
        tl.max(tl.where(second == second, tl.abs(second), float("inf")), 1),
    )
    scales_M = _rounded(tl.math.div_rn(largest, tl.zeros_like(largest) + LARGEST), tl.bfloat16)
    return tl.where(scales_M == 0.0, 1.0, scales_M)


def readable(pages: Tensor) -> Tensor:
    """Bits, or on a device that has instructions for them, numbers."""
    if pages.device.type == "cuda" and torch.cuda.get_device_capability(pages.device) >= FIRST_CAPABILITY:
        return pages.view(torch.float8_e4m3fn)
    return pages
