"""Attention over pages where they lie, as Triton kernels: one launch for all segments of a pass.

A program works on one tile of a segment's queries and one key/value head. The query heads that share the head
are rows of the same tile, so keys and values are read once per group (as in vLLM's unified attention). The
keys are cut into *splits* of a fixed number of positions; every split has a softmax of its own
(FlashAttention, Dao et al. 2022, Algorithm 1), and the splits are joined from the first to the last. With few
tiles the splits are separate programs, and a second kernel joins them (Flash-Decoding); with many, a program
goes through all of them. Both do the same arithmetic in the same order, so the output of a query does not
depend on how many others the batch has. With few queries in each segment tiles are smaller: they go through
the same steps, but a device may round their sums otherwise.

Keys may be wider than values. Then their first numbers, as many as a value has, and the rest make two
products. Those of latent attention are the values, too, and are read once for both. Where so many heads share
a key that their rows fit into no tile, each program takes a part of them.

T flat tokens, S segments, P pages per segment, H heads, G key/value heads, D width of a value, E what keys
have more.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.attention_tiles import Tile, heads_of_program, own_tile
from specdist.kernels.float8_cache import plain_numbers, readable

# Positions of a split: short enough that a few long sequences fill a device, long enough that what a split
# leaves for the join is small beside its keys and values.
SPLIT_KEYS = 512
# With fewer programs than this, splits become programs of their own: two waves of the largest devices' 150
# multiprocessors.
MIN_PROGRAMS = 300
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _dot(left, right, accumulator):
    """Matrix product, added to the accumulator. The interpreter takes bfloat16 for integers: there the
    operands are widened first, which changes no product."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, accumulator, input_precision="ieee")


@triton.jit
def _join(maxima, sums, outputs, split_maxima, split_sums, split_outputs):
    """A softmax over more keys. ``maxima`` are of base-2 exponents; a row without keys has -inf, 0 and
    zeros."""
    joined = tl.maximum(maxima, split_maxima)
    finite = tl.where(joined == float("-inf"), 0.0, joined)
    old, new = tl.exp2(maxima - finite), tl.exp2(split_maxima - finite)
    return joined, sums * old + split_sums * new, outputs * old[:, None] + split_outputs * new[:, None]


@triton.jit
def _without_keys(sinks, head_M, is_query, block_rows: tl.constexpr):
    """Largest exponents [M] and sums [M] of a softmax before its first key. A sink is a weight without a
    value, which is there once, however many splits follow."""
    if sinks is None:
        maxima = tl.full([block_rows], float("-inf"), tl.float32)
        sums = tl.zeros([block_rows], tl.float32)
    else:
        maxima = tl.load(sinks + head_M, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        sums = tl.full([block_rows], 1.0, tl.float32)
    return maxima, sums


@triton.jit
def _one_split(
    queries, rest_queries, key_pages, value_pages, key_scales, value_scales, table_row, first_key, last_key,
    kv_head, position_M, columns_D, columns_E, scale, softcap, stride_page, stride_token, stride_head,
    num_kv_heads: tl.constexpr, width: tl.constexpr,
    rest_width: tl.constexpr, is_latent: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    hides_first: tl.constexpr, has_softcap: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    block_width: tl.constexpr,
):  # fmt: skip
    """Softmax over keys [first, last): largest exponents [M], sums [M], and weighted values [M, D] in
    float32."""
    maxima = tl.full([block_rows], float("-inf"), tl.float32)
    sums = tl.zeros([block_rows], tl.float32)
    outputs = tl.zeros([block_rows, block_width], tl.float32)
    for start in range(first_key, last_key, block_keys):
        keys_N = start + tl.arange(0, block_keys)
        is_key = keys_N < last_key
        pages_N = tl.load(table_row + keys_N // page_size, mask=is_key, other=0).to(tl.int64)
        places_N = pages_N * stride_page + (keys_N % page_size) * stride_token + kv_head * stride_head
        # Beyond the last key lie other sequences' values, or nothing: 0 × NaN would be NaN.
        is_read = is_key[:, None] & (columns_D < width)[None, :]
        keys = tl.load(key_pages + places_N[:, None] + columns_D[None, :], mask=is_read, other=0.0)
        if key_scales is not None:
            keys = plain_numbers(keys, queries.dtype)
        scores = _dot(queries, tl.trans(keys), tl.zeros([block_rows, block_keys], tl.float32))
        if rest_width > 0:
            is_rest = is_key[:, None] & (columns_E < rest_width)[None, :]
            rest_keys = tl.load(
                key_pages + width + places_N[:, None] + columns_E[None, :], mask=is_rest, other=0.0
            )
            if key_scales is not None:
                rest_keys = plain_numbers(rest_keys, queries.dtype)
            scores = _dot(rest_queries, tl.trans(rest_keys), scores)
        scale_places_N = (pages_N * page_size + keys_N % page_size) * num_kv_heads + kv_head
        if key_scales is not None:
            key_scales_N = tl.load(key_scales + scale_places_N, mask=is_key, other=0.0)
            scores *= key_scales_N.to(tl.float32)[None, :]
        if has_softcap:
            decayed = tl.exp2(-tl.abs(scores * scale))
            capped = softcap * (1.0 - decayed) / (1.0 + decayed)
            scores = tl.where(scores * scale < 0, -capped, capped)
        else:
            scores = scores * scale
        is_seen = is_key[None, :] & (keys_N[None, :] <= position_M[:, None])
        if window > 0:
            is_seen &= keys_N[None, :] > position_M[:, None] - window
        if hides_first:
            is_seen &= (keys_N[None, :] > 0) | (position_M[:, None] == 0)
        scores = tl.where(is_seen, scores, float("-inf"))
        largest = tl.maximum(maxima, tl.max(scores, 1))
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(maxima - finite)
        if is_latent:
            values = keys
        else:
            value_places_N = places_N
            if rest_width > 0:  # their pages are laid out like those of the keys
                value_places_N = places_N // (width + rest_width) * width
            values = tl.load(
                value_pages + value_places_N[:, None] + columns_D[None, :], mask=is_read, other=0.0
            )
            if value_scales is not None:
                values = plain_numbers(values, queries.dtype)
        sums = sums * decay + tl.sum(weights, 1)
        if value_scales is not None:
            # A weight may be too small then for float16.
            values = values.to(tl.float32 if queries.dtype == tl.float32 else tl.bfloat16)
            value_scales_N = tl.load(value_scales + scale_places_N, mask=is_key, other=0.0)
            weights *= value_scales_N.to(tl.float32)[None, :]
        outputs = _dot(weights.to(values.dtype), values, outputs * decay[:, None])
        maxima = largest
    return maxima, sums, outputs


# Numbers that change from pass to pass compile nothing anew.
@triton.jit(do_not_specialize=["num_segments", "num_splits", "stride_table"])
def attend_kernel(
    queries, key_pages, value_pages, key_scales, value_scales, block_table, sinks, used_keys, query_starts,
    output, split_outputs, split_maxima, split_sums, num_segments, scale, softcap, stride_token_heads,
    stride_query_head, stride_page, stride_token, stride_head, stride_table, num_splits,
    num_heads: tl.constexpr, num_repeats: tl.constexpr, num_parts: tl.constexpr, width: tl.constexpr,
    rest_width: tl.constexpr, is_latent: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    is_causal: tl.constexpr, hides_first: tl.constexpr, has_softcap: tl.constexpr, in_splits: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr, block_width: tl.constexpr, block_rest: tl.constexpr,
    split_keys: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, key/value heads × ``num_parts`` of the heads that share them, splits if ``in_splits``
    else 1)."""
    segment, begin, num_queries, first_query, first_position, first_key, last_key = own_tile(
        query_starts,
        used_keys,
        num_segments,
        num_repeats,
        window,
        is_causal,
        block_rows,
        block_keys,
    )
    if first_query >= num_queries:
        return
    head = tl.program_id(1)
    rows_M = tl.arange(0, block_rows)
    query_M = first_query + rows_M // num_repeats
    head_M = head * num_repeats + rows_M % num_repeats
    is_query = (query_M < num_queries) & (rows_M < block_rows // num_repeats * num_repeats)
    position_M = first_position + query_M
    if not is_causal:
        position_M = last_key - 1 + 0 * query_M
    columns_D = tl.arange(0, block_width)
    is_used = is_query[:, None] & (columns_D < width)[None, :]
    token_M = (begin + query_M).to(tl.int64)
    places_M = token_M * stride_token_heads + head_M * stride_query_head
    tile_queries = tl.load(queries + places_M[:, None] + columns_D[None, :], mask=is_used, other=0.0)
    columns_E = tl.arange(0, block_rest)
    rest_queries = tile_queries
    if rest_width > 0:
        is_rest = is_query[:, None] & (columns_E < rest_width)[None, :]
        rest_queries = tl.load(
            queries + width + places_M[:, None] + columns_E[None, :], mask=is_rest, other=0.0
        )
    kv_head = head // num_parts
    num_kv_heads: tl.constexpr = num_heads // (num_repeats * num_parts)
    table_row = block_table + segment.to(tl.int64) * stride_table
    if in_splits:
        split = tl.program_id(2)
        begin_key = tl.maximum(split * split_keys, first_key)
        end_key = tl.minimum((split + 1) * split_keys, last_key)
        if begin_key < end_key:
            maxima, sums, outputs = _one_split(
                tile_queries, rest_queries, key_pages, value_pages, key_scales, value_scales, table_row,
                begin_key, end_key, kv_head, position_M, columns_D, columns_E, scale, softcap, stride_page,
                stride_token, stride_head, num_kv_heads, width, rest_width, is_latent, page_size, window,
                hides_first, has_softcap, block_rows, block_keys, block_width,
            )  # fmt: skip
            places_M = (token_M * num_heads + head_M) * num_splits + split
            tl.store(split_maxima + places_M, maxima, mask=is_query)
            tl.store(split_sums + places_M, sums, mask=is_query)
            places_MD = places_M[:, None] * width + columns_D[None, :]
            tl.store(split_outputs + places_MD, outputs, mask=is_used)
    else:
        maxima, sums = _without_keys(sinks, head_M, is_query, block_rows)
        outputs = tl.zeros([block_rows, block_width], tl.float32)
        for split in range(first_key // split_keys, tl.cdiv(last_key, split_keys)):
            begin_key = tl.maximum(split * split_keys, first_key)
            end_key = tl.minimum((split + 1) * split_keys, last_key)
            new_maxima, new_sums, new_outputs = _one_split(
                tile_queries, rest_queries, key_pages, value_pages, key_scales, value_scales, table_row,
                begin_key, end_key, kv_head, position_M, columns_D, columns_E, scale, softcap, stride_page,
                stride_token, stride_head, num_kv_heads, width, rest_width, is_latent, page_size, window,
                hides_first, has_softcap, block_rows, block_keys, block_width,
            )  # fmt: skip
            maxima, sums, outputs = _join(maxima, sums, outputs, new_maxima, new_sums, new_outputs)
        places_M = (token_M * num_heads + head_M) * width
        result = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]
        tl.store(output + places_M[:, None] + columns_D[None, :], result, mask=is_used)


@triton.jit(do_not_specialize=["num_segments", "num_splits"])
def join_kernel(
    sinks, used_keys, query_starts, output, split_outputs, split_maxima, split_sums, num_segments, num_splits,
    num_heads: tl.constexpr, num_repeats: tl.constexpr, width: tl.constexpr, window: tl.constexpr,
    is_causal: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr, block_width: tl.constexpr,
    split_keys: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, key/value heads × parts). Joins what the splits' programs left, from the first on."""
    _, begin, num_queries, first_query, _, first_key, last_key = own_tile(
        query_starts,
        used_keys,
        num_segments,
        num_repeats,
        window,
        is_causal,
        block_rows,
        block_keys,
    )
    if first_query >= num_queries:
        return
    rows_M = tl.arange(0, block_rows)
    query_M = first_query + rows_M // num_repeats
    head_M = tl.program_id(1) * num_repeats + rows_M % num_repeats
    is_query = (query_M < num_queries) & (rows_M < block_rows // num_repeats * num_repeats)
    columns_D = tl.arange(0, block_width)
    is_used = is_query[:, None] & (columns_D < width)[None, :]
    places_M = (begin + query_M).to(tl.int64) * num_heads + head_M
    maxima, sums = _without_keys(sinks, head_M, is_query, block_rows)
    outputs = tl.zeros([block_rows, block_width], tl.float32)
    for split in range(first_key // split_keys, tl.cdiv(last_key, split_keys)):
        split_M = places_M * num_splits + split
        maxima, sums, outputs = _join(
            maxima,
            sums,
            outputs,
            tl.load(split_maxima + split_M, mask=is_query, other=float("-inf")),
            tl.load(split_sums + split_M, mask=is_query, other=0.0),
            tl.load(split_outputs + split_M[:, None] * width + columns_D[None, :], mask=is_used, other=0.0),
        )
    result = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]
    tl.store(output + places_M[:, None] * width + columns_D[None, :], result, mask=is_used)


@torch.library.custom_op("specdist::paged_attention", mutates_args=())
def paged_attention(
    queries_THD: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table_SP: Tensor,
    used_S: Tensor,
    query_starts_S1: Tensor,
    sinks_H: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    max_queries: int,
    max_keys: int,
    max_split_bytes: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    is_latent: bool = False,
    hides_first: bool = False,
    is_causal: bool = True,
) -> Tensor:
    """Attention of every segment over its pages: output [T, H, D]; zeros where a query sees no key.

    Args:
        key_pages, value_pages: [pages, page size, G, D + E] like the queries, and [.., D], in one dtype with
            them; or the bits of numbers in 8 bits, with ``key_scales`` and ``value_scales``, contiguous.
        block_table_SP: int32 page of every stretch of positions; entries after a segment's last key are not
            read.
        used_S: int32 keys of each segment, its queries' own among them: the queries are its last tokens.
        query_starts_S1: int32 first query of each segment, and the number of queries.
        sinks_H: a logit of each head that joins its softmax and has no value.
        max_queries, max_keys: no segment has more.
        max_split_bytes: no more memory is taken for splits that are programs of their own.
        scale: of the scores; None is (D + E) ** -0.5.
        window: keys that a query sees, its own among them; None is all before it.
        softcap: scores become ``softcap × tanh(score / softcap)``.
        is_latent: the values are the first numbers of the keys.
        hides_first: no query sees the first key, but one at its position.
        is_causal: if not, a query sees all keys of its segment, without a window.

    Raises ValueError for values that are wider than the keys.
    """
    num_tokens, num_heads, key_width = queries_THD.shape
    page_size, num_kv_heads, width = value_pages.shape[1:]
    rest_width = key_width - width
    if rest_width < 0:
        raise ValueError(f"values of {width} are wider than keys of {key_width}")
    num_repeats, num_parts = heads_of_program(width, num_heads // num_kv_heads)
    if queries_THD.stride(2) != 1:
        queries_THD = queries_THD.contiguous()
    if key_scales is not None:
        key_pages, value_pages = readable(key_pages), readable(value_pages)
    tile = Tile.of(width, num_repeats, queries_THD.dtype, max_queries, rest_width)
    block_rows = tile.num_rows
    num_splits = triton.cdiv(max_keys, SPLIT_KEYS)
    # Every segment may leave one tile incomplete.
    num_tiles = num_tokens // (block_rows // num_repeats) + len(used_S)
    split_bytes = num_tokens * num_heads * num_splits * (width + 2) * torch.float32.itemsize
    needs_programs = num_tiles * num_kv_heads * num_parts < MIN_PROGRAMS
    in_splits = num_splits > 1 and needs_programs and split_bytes <= max_split_bytes
    output = queries_THD.new_empty(num_tokens, num_heads, width)
    split_shape = (num_tokens, num_heads, num_splits) if in_splits else (1, 1, 1)
    split_outputs = output.new_empty(*split_shape, width, dtype=torch.float32)
    split_maxima, split_sums = output.new_empty(2, *split_shape, dtype=torch.float32)
    shared = {
        "num_heads": num_heads,
        "num_repeats": num_repeats,
        "width": width,
        "window": window or 0,
        "is_causal": is_causal,
        "block_rows": block_rows,
        "block_keys": tile.num_keys,
        "block_width": triton.next_power_of_2(width),
        "split_keys": SPLIT_KEYS,
        **tile.options,
    }
    # Exponents are of base 2. tanh(x) = (1 - exp(-2x)) / (1 + exp(-2x)): with a soft cap the scale is that of
    # 2x.
    exponent_scale = LOG2_E.value * (key_width**-0.5 if scale is None else scale)
    if softcap is not None:
        exponent_scale *= 2 / softcap
    of_segments = (
        sinks_H, used_S, query_starts_S1, output, split_outputs, split_maxima, split_sums, len(used_S),
    )  # fmt: skip
    attend_kernel[(num_tiles, num_kv_heads * num_parts, num_splits if in_splits else 1)](
        queries_THD,
        key_pages,
        value_pages,
        key_scales,
        value_scales,
        block_table_SP,
        *of_segments,
        exponent_scale,
        LOG2_E.value * (softcap or 0.0),
        *queries_THD.stride()[:2],
        *key_pages.stride()[:3],
        block_table_SP.stride(0),
        num_splits,
        num_parts=num_parts,
        rest_width=rest_width,
        is_latent=is_latent,
        page_size=page_size,
        hides_first=hides_first,
        has_softcap=softcap is not None,
        in_splits=in_splits,
        block_rest=triton.next_power_of_2(max(1, rest_width)),
        **shared,
    )
    if in_splits:
        join_kernel[(num_tiles, num_kv_heads * num_parts)](*of_segments, num_splits, **shared)
    return output
