"""What a program of :mod:`specdist.kernels.paged_attention` works on at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Rows (queries × heads that share a key/value head) of a tile, and keys per step by the head's width. On an
# H200 these tiles took 0.37 to 0.8 of the time of 64 rows, 32 keys and 8 warps (jobs/benchmarks/h200). Wider
# heads take what fits into the registers (tests/kernels/test_compilation.py), and so do products of float32
# numbers, which tensor cores do not make.
LEAST_ROWS, MOST_ROWS = 16, 64
KEYS_OF_WIDTHS = {16: 128, 32: 128, 64: 128, 128: 64}
WIDE_ROWS, WIDE_KEYS = 32, 32
FLOAT32_BLOCK = 16
# For wider values than these a tile holds fewer rows, and fewer of the heads that share a key.
WIDEST_WHOLE, WIDEST_ROWS, MOST_HEADS = 256, 32, 16
# Without contraction into fused multiply-adds both ways to join splits round alike.
OPTIONS: dict[str, int | bool] = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time, and how it is compiled for that.

    Attributes:
        num_rows: at least one query of the heads that share a key/value head.
        num_keys: per step.
    """

    num_rows: int
    num_keys: int
    options: dict[str, int | bool]

    @staticmethod
    def of(width: int, num_repeats: int, dtype: torch.dtype, num_queries: int, rest_width: int = 0) -> Tile:
        """The tile for values of this width and keys of ``rest_width`` more, ``num_repeats`` heads of a
        program that share a key/value head, and segments of at most so many queries."""
        least_rows = triton.next_power_of_2(num_repeats)
        if dtype == torch.float32:
            options = {"num_warps": 8, "maxnreg": 255}
            return Tile(max(FLOAT32_BLOCK, least_rows), FLOAT32_BLOCK, OPTIONS | options)
        if width > WIDEST_WHOLE:
            wanted_rows = triton.next_power_of_2(num_queries * num_repeats)
            num_rows = max(LEAST_ROWS, least_rows, min(WIDEST_ROWS, wanted_rows))
            options = {"num_warps": 4 if num_rows == LEAST_ROWS else 8, "num_stages": 2}
            return Tile(num_rows, WIDE_KEYS, OPTIONS | options)
        num_keys = None if rest_width else KEYS_OF_WIDTHS.get(width)
        if num_keys is None:
            options = {"maxnreg": 255} if width <= max(KEYS_OF_WIDTHS) else {"num_warps": 8}
            return Tile(max(WIDE_ROWS, least_rows), WIDE_KEYS, OPTIONS | options)
        wanted_rows = triton.next_power_of_2(num_queries * num_repeats)
        num_rows = max(LEAST_ROWS, least_rows, min(MOST_ROWS, wanted_rows))
        # Long steps need few of them in flight.
        return Tile(num_rows, num_keys, OPTIONS | {"num_stages": 2} if num_rows >= MOST_ROWS else OPTIONS)


def heads_of_program(width: int, num_repeats: int) -> tuple[int, int]:
    """How many of the ``num_repeats`` heads that share a key/value head of this width a program takes, and
    the number of programs that take them all."""
    most = MOST_HEADS if width > WIDEST_WHOLE else num_repeats
    num_heads = max(each for each in range(1, most + 1) if num_repeats % each == 0)
    return num_heads, num_repeats // num_heads


@triton.jit
def _segment_of(tile, query_starts, num_segments, block_queries: tl.constexpr):
    """Which segment a tile belongs to: segment s has its tiles from ``query_starts[s] // block_queries +
    s``."""
    low, high = 0, num_segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // block_queries + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def own_tile(
    query_starts,
    used_keys,
    num_segments,
    num_repeats: tl.constexpr,
    window: tl.constexpr,
    is_causal: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """This program's tile: its segment, the segment's first query and number of queries, the tile's first
    query within the segment, the position of the segment's first query, and the keys [first, last) that the
    tile sees."""
    tile = tl.program_id(0)
    block_queries: tl.constexpr = block_rows // num_repeats
    segment = _segment_of(tile, query_starts, num_segments, block_queries)
    begin = tl.load(query_starts + segment)
    num_queries = tl.load(query_starts + segment + 1) - begin
    first_query = (tile - begin // block_queries - segment) * block_queries
    first_position = tl.load(used_keys + segment) - num_queries
    last_query = first_query + block_queries
    if not is_causal:
        last_query = num_queries
    last_key = first_position + tl.minimum(last_query, num_queries)
    first_key = 0
    if window > 0:
        first_key = tl.maximum(first_position + first_query - window + 1, 0) // block_keys * block_keys
    return segment, begin, num_queries, first_query, first_position, first_key, last_key
