"""A sum over ranks with the residual and the norm after it in one kernel, for more rows than each rank should
sum by itself.

A rank sums its own rows, adds the residual, and writes the result into the memory of all: with n ranks it
reads and writes 2 (n - 1) / n of the numbers over the links, where
:func:`specdist.kernels.layers.residual_norm` reads them n - 1 times. All ranks norm all rows then, which is
less work than to send them twice. Numbers are added in the order of the ranks, and rounded as there: all
ranks have the same bits, and those of that kernel.

A rank's memory has a half of terms and one of results. A program writes the terms of its rows, meets those of
its number (:mod:`specdist.kernels.peer_sums`), sums and sends the rows that are its rank's, and meets them
again. No half is written twice between two meetings: the kernel before has ended on a rank that comes to one,
and so has the reading of its results, and that of its terms by the others.

M rows, W width of a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.layers import _normed, _rounded, run_residual_norm
from specdist.kernels.peer_sums import memories_of, memory_of, met

# Programs wait for those of other ranks: a device has more multiprocessors.
MAX_PROGRAMS = 64


@triton.jit
def _places(block, num_rows, width: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr):
    """Of a block of rows in contiguous memory, and which of them there are."""
    rows_M = block * block_rows + tl.arange(0, block_rows)
    columns_W = tl.arange(0, block_width)
    is_used = (rows_M < num_rows)[:, None] & (columns_W < width)[None, :]
    return rows_M[:, None] * width + columns_W[None, :], is_used


@triton.jit(do_not_specialize=["num_rows", "rank", "most_waits"])
def shared_rows_kernel(
    inputs, residual, weight_before, weight, sums, output, peers, turns, num_rows, rank, most_waits,
    epsilon, width: tl.constexpr, weight_offset: tl.constexpr, rounds_first: tl.constexpr,
    is_normed_before: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
    num_ranks: tl.constexpr, block_ranks: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,). A program's first block of rows is that of its number; ranks own them in turns."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_blocks = tl.cdiv(num_rows, block_rows)
    columns_W = tl.arange(0, block_width)
    dtype: tl.constexpr = inputs.dtype.element_ty
    mine, memories = memory_of(peers, rank, dtype), memories_of(peers, num_ranks, dtype)
    turn = tl.load(turns + program)
    signals = 2 * half * (dtype.primitive_bitwidth // 8)
    for block in range(program, num_blocks, num_programs):
        places, is_used = _places(block, num_rows, width, block_rows, block_width)
        tl.store(mine + places, tl.load(inputs + places, mask=is_used), mask=is_used)
    turn = met(peers, signals, turn + 1, rank, most_waits, num_ranks, block_ranks)
    first = program + (rank + num_ranks - program % num_ranks) % num_ranks * num_programs
    for block in range(first, num_blocks, num_ranks * num_programs):
        places, is_used = _places(block, num_rows, width, block_rows, block_width)
        numbers = tl.zeros((block_rows, block_width), tl.float32)
        for peer in tl.static_range(num_ranks):
            term = tl.load(memories[peer] + places, mask=is_used, other=0.0, volatile=True)
            numbers += term.to(tl.float32)
        numbers = _rounded(numbers, dtype)
        if is_normed_before:
            numbers = _normed(
                numbers, weight_before, columns_W, epsilon, width, weight_offset, rounds_first, dtype
            )
        numbers += tl.load(residual + places, mask=is_used, other=0.0).to(tl.float32)
        for peer in tl.static_range(num_ranks):
            result = memory_of(peers, peer, dtype) + half
            tl.store(result + places, _rounded(numbers, dtype), mask=is_used)
    turn = met(peers, signals, turn + 1, rank, most_waits, num_ranks, block_ranks)
    tl.store(turns + program, turn)
    for block in range(program, num_blocks, num_programs):
        places, is_used = _places(block, num_rows, width, block_rows, block_width)
        numbers = tl.load(mine + half + places, mask=is_used, other=0.0, volatile=True).to(tl.float32)
        numbers = tl.where(turn < 0, float("nan"), numbers)
        tl.store(sums + places, numbers, mask=is_used)
        numbers = _normed(numbers, weight, columns_W, epsilon, width, weight_offset, rounds_first, dtype)
        tl.store(output + places, numbers, mask=is_used)


def shared_residual_norm(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """What :func:`specdist.kernels.layers.residual_norm` gives of the same arguments; ``turns`` are those of
    programs, at least :data:`MAX_PROGRAMS`."""
    return run_residual_norm(shared_rows_kernel, *tensors, most_programs=MAX_PROGRAMS, **options)
