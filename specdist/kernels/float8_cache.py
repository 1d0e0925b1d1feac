"""Keys and values of the cache in 8 bits, float8_e4m3fn with a scale of each token and head: how they are
written, and what other kernels make of them.

Older GPUs than those of compute capability 8.9 have no instructions for float8. They are given its bits, of
which plain operations make the same numbers.

T tokens, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.layers import OPTIONS, _rounded
from specdist.kernels.rounding import float8_bits

LARGEST = tl.constexpr(448.0)
FIRST_CAPABILITY = (8, 9)
WRITE_OPTIONS = OPTIONS | {"num_warps": 1}


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
def _write(tokens, pages, scale_pages, place, head, num_heads: tl.constexpr, width: tl.constexpr,
           block: tl.constexpr):  # fmt: skip
    """A head of a token."""
    columns_D = tl.arange(0, block)
    numbers = tl.load(tokens + columns_D, mask=columns_D < width, other=0.0).to(tl.float32)
    sizes = tl.where(numbers == numbers, tl.abs(numbers), float("inf"))
    scale = _rounded(tl.math.div_rn(tl.max(sizes, 0), LARGEST), tl.bfloat16)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scale_pages + place * num_heads + head, scale.to(tl.bfloat16))
    bits = float8_bits(tl.math.div_rn(numbers, scale + tl.zeros_like(numbers)))
    tl.store(
        pages + (place * num_heads + head) * width + columns_D, bits.to(tl.uint8), mask=columns_D < width
    )


@triton.jit
def write_float8_kernel(
    keys, values, cache_index, key_pages, value_pages, key_scales, value_scales, stride_key_token,
    stride_key_head, stride_value_token, stride_value_head, num_heads: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(cache_index + token)
    own_keys = keys + token * stride_key_token + head * stride_key_head
    _write(own_keys, key_pages, key_scales, place, head, num_heads, width, block)
    own_values = values + token * stride_value_token + head * stride_value_head
    _write(own_values, value_pages, value_scales, place, head, num_heads, width, block)


@torch.library.custom_op(
    "specdist::write_float8_tokens",
    mutates_args=("key_pages", "value_pages", "key_scales", "value_scales"),
)
def write_float8_tokens(
    key_pages: Tensor, value_pages: Tensor, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor,
    key_scales: Tensor, value_scales: Tensor,
) -> None:  # fmt: skip
    """Write each token's keys and values at ``cache_index_T``, counted in tokens from the first page.

    Args:
        key_pages, value_pages: bits, uint8; key_scales, value_scales: bfloat16. All contiguous.
        cache_index_T: int64.
    """
    num_tokens, num_heads, width = keys_TGD.shape
    if keys_TGD.stride(2) != 1 or values_TGD.stride(2) != 1:
        keys_TGD, values_TGD = keys_TGD.contiguous(), values_TGD.contiguous()
    if num_tokens:
        write_float8_kernel[(num_tokens, num_heads)](
            keys_TGD, values_TGD, cache_index_T, key_pages, value_pages, key_scales, value_scales,
            *keys_TGD.stride()[:2], *values_TGD.stride()[:2], num_heads=num_heads, width=width,
            block=triton.next_power_of_2(width), **WRITE_OPTIONS,
        )  # fmt: skip


def readable(pages: Tensor) -> Tensor:
    """Bits, or on a device that has instructions for them, numbers."""
    if pages.device.type == "cuda" and torch.cuda.get_device_capability(pages.device) >= FIRST_CAPABILITY:
        return pages.view(torch.float8_e4m3fn)
    return pages
