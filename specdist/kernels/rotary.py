"""Rotary embeddings of queries and keys, and the writing of keys and values into the cache, as numbers or in
8 bits: one kernel, which does both, or one of them.

Numbers are rounded where plain operations round them, and a head's do not depend on the others.

T tokens, H heads, G key/value heads, D head width, an even number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.float8_cache import head_scales
from specdist.kernels.layers import OPTIONS, _rounded
from specdist.kernels.rounding import float8_bits

HEADS_PER_PROGRAM = 4


@triton.jit
def _rotated(numbers, cos, others, sin, dtype: tl.constexpr):
    """numbers × cos + others × sin, each step rounded to the dtype; the arguments are float32."""
    return _rounded(_rounded(numbers * cos, dtype) + _rounded(others * sin, dtype), dtype)


@triton.jit
def _row(places, is_used):
    """float32 [1, D]."""
    return tl.load(places, mask=is_used, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _or(numbers, places, is_used):
    """float32: what is used of these places, and the numbers elsewhere."""
    return tl.where(is_used, tl.load(places, mask=is_used, other=0.0).to(tl.float32), numbers)


@triton.jit
def _write(numbers, scales_M, to, key_pages, value_pages, is_key, is_value, is_float8: tl.constexpr):
    """A half of each head."""
    if is_float8:
        scales = tl.broadcast_to(scales_M[:, None], numbers.shape)
        numbers = float8_bits(tl.math.div_rn(numbers, scales)).to(tl.uint8)
    tl.store(key_pages + to, numbers, mask=is_key)
    tl.store(value_pages + to, numbers, mask=is_value)


@triton.jit
def heads_kernel(
    queries, keys, values, cos, sin, rotated_queries, rotated_keys, cache_index, key_pages, value_pages,
    key_scales, value_scales, num_heads, num_kv_heads, stride_query_token, stride_query_head,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head, stride_cos_token,
    stride_sin_token, width: tl.constexpr, rotates: tl.constexpr, writes: tl.constexpr,
    is_float8: tl.constexpr, block_heads: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads); the heads of the keys follow those of the queries, if they are
    rotated, and those of the values, if they are written, the keys'."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = width // 2
    heads_M = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    columns_D = tl.arange(0, block_half)
    is_half = columns_D < half
    key_heads_M = heads_M - num_heads
    is_key_M = (key_heads_M >= 0) & (key_heads_M < num_kv_heads)
    is_key = is_key_M[:, None] & is_half[None, :]
    from_key = keys + token * stride_key_token + key_heads_M[:, None] * stride_key_head + columns_D[None, :]
    first = _or(0.0, from_key, is_key)
    second = _or(0.0, from_key + half, is_key)
    if rotates:
        dtype: tl.constexpr = keys.dtype.element_ty
        is_query = (heads_M < num_heads)[:, None] & is_half[None, :]
        from_query = queries + token * stride_query_token
        from_query += heads_M[:, None] * stride_query_head + columns_D[None, :]
        first, second = _or(first, from_query, is_query), _or(second, from_query + half, is_query)
        from_cos, from_sin = (
            cos + token * stride_cos_token + columns_D,
            sin + token * stride_sin_token + columns_D,
        )
        cos_first, sin_first = _row(from_cos, is_half), _row(from_sin, is_half)
        rotated = _rotated(first, cos_first, -second, sin_first, dtype)
        second = _rotated(
            second, _row(from_cos + half, is_half), first, _row(from_sin + half, is_half), dtype
        )
        first = rotated
        to_query = rotated_queries + (token * num_heads + heads_M[:, None]) * width + columns_D[None, :]
        tl.store(to_query, first, mask=is_query)
        tl.store(to_query + half, second, mask=is_query)
        to_key = rotated_keys + (token * num_kv_heads + key_heads_M[:, None]) * width + columns_D[None, :]
        tl.store(to_key, first, mask=is_key)
        tl.store(to_key + half, second, mask=is_key)
    if writes:
        value_heads_M = key_heads_M - num_kv_heads
        is_value_M = (value_heads_M >= 0) & (value_heads_M < num_kv_heads)
        is_value = is_value_M[:, None] & is_half[None, :]
        from_value = values + token * stride_value_token
        from_value += value_heads_M[:, None] * stride_value_head + columns_D[None, :]
        first, second = _or(first, from_value, is_value), _or(second, from_value + half, is_value)
        own_M = tl.where(is_value_M, value_heads_M, key_heads_M)
        places_M = tl.load(cache_index + token) * num_kv_heads + own_M
        scales_M = places_M
        if is_float8:
            scales_M = head_scales(first, second)
            tl.store(key_scales + places_M, scales_M.to(tl.bfloat16), mask=is_key_M)
            tl.store(value_scales + places_M, scales_M.to(tl.bfloat16), mask=is_value_M)
        to = places_M[:, None] * width + columns_D[None, :]
        _write(first, scales_M, to, key_pages, value_pages, is_key, is_value, is_float8)
        _write(second, scales_M, to + half, key_pages, value_pages, is_key, is_value, is_float8)


@torch.library.custom_op("specdist::rotary", mutates_args=())
def rotary(queries_THD: Tensor, keys_TGD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, rotated: x × cos + (-second half of x, first half of x) × sin. All of one dtype."""
    return _rotate(queries_THD, keys_TGD, cos_TD, sin_TD)


@torch.library.custom_op(
    "specdist::write_tokens", mutates_args=("key_pages", "value_pages", "key_scales", "value_scales")
)
def write_tokens(
    key_pages: Tensor, value_pages: Tensor, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write each token's keys and values at ``cache_index_T``, counted in tokens from the first page.

    Args:
        key_pages, value_pages: contiguous, in the dtype of the keys; with ``key_scales`` and
            ``value_scales``, bfloat16, the bits of numbers in 8 bits, uint8.
        cache_index_T: int64.
    """
    cache = cache_index_T, key_pages, value_pages, key_scales, value_scales
    _launch(None, keys_TGD, values_TGD, None, None, None, None, *cache)


@torch.library.custom_op(
    "specdist::write_rotated", mutates_args=("key_pages", "value_pages", "key_scales", "value_scales")
)
def write_rotated(
    key_pages: Tensor, value_pages: Tensor, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor,
    queries_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`rotary`, and the rotated keys and the values are written as by :func:`write_tokens`."""
    cache = cache_index_T, key_pages, value_pages, key_scales, value_scales
    return _rotate(queries_THD, keys_TGD, cos_TD, sin_TD, values_TGD, *cache)


def _rotate(
    queries_THD: Tensor, keys_TGD: Tensor, cos_TD: Tensor, sin_TD: Tensor, values_TGD: Tensor | None = None,
    *cache: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rotated = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (queries_THD, keys_TGD)
    ]
    _launch(queries_THD, keys_TGD, values_TGD, cos_TD, sin_TD, *rotated, *(cache or 5 * (None,)))
    return rotated[0], rotated[1]


def _launch(
    queries_THD: Tensor | None, keys_TGD: Tensor, values_TGD: Tensor | None, cos_TD: Tensor | None,
    sin_TD: Tensor | None, *others: Tensor | None,
) -> None:  # fmt: skip
    num_tokens, num_kv_heads, width = keys_TGD.shape
    inputs = [
        each if each is None or each.stride(-1) == 1 else each.contiguous()
        for each in (queries_THD, keys_TGD, values_TGD, cos_TD, sin_TD)
    ]
    strides = [(0, 0) if each is None else each.stride()[:-1] for each in inputs]
    num_heads, writes = 0 if queries_THD is None else queries_THD.shape[1], values_TGD is not None
    if num_tokens:
        num_rows = num_heads + (1 + writes) * num_kv_heads
        heads_kernel[(num_tokens, triton.cdiv(num_rows, HEADS_PER_PROGRAM))](
            *inputs, *others, num_heads, num_kv_heads, *strides[0], *strides[1], *strides[2], strides[3][0],
            strides[4][0], width=width, rotates=queries_THD is not None, writes=writes,
            is_float8=others[-1] is not None, block_heads=HEADS_PER_PROGRAM,
            block_half=triton.next_power_of_2(width // 2), **OPTIONS,
        )  # fmt: skip
