"""Sums over the ranks of a group inside of a kernel, by memory that peers read, write and signal.

A rank's memory has two halves of numbers, and a signal of each program and rank. A program writes its term
into the half of its turn, meets those of its number on all ranks, and adds the terms in the order of the
ranks, so that all have the same bits. A half is written again two turns later, when each peer has signalled
the turn between, which it does after the kernel that read the half. Programs count their turns in memory of
the device, so that a recorded call goes on counting. They wait for those of the same number, so no more may
be started than a device runs at once, and no kernel before the one before it in the stream has ended.

A rank that has looked ``most_waits`` times for a signal gives up: its sums are NaN from then on, it waits no
more, and the number of the rank that is missing, from 1, is in memory of the host. References: torch's
one-shot all-reduce (``CUDASymmetricMemoryOps.cu``); PTX's memory model.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The turn of a program that has given up: no peer takes it for a signal.
GIVEN_UP = tl.constexpr(-(2**62))


@triton.jit
def memory_of(peers, rank, dtype: tl.constexpr):
    """Where a rank's numbers begin."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def memories_of(peers, num_ranks: tl.constexpr, dtype: tl.constexpr):
    """Those of all ranks."""
    found = ()
    for rank in tl.static_range(num_ranks):
        found = found + (memory_of(peers, rank, dtype),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def met(peers, signals, turn, rank, most_waits, num_ranks: tl.constexpr, block_ranks: tl.constexpr):
    """The turn, once the programs of this number have come to it on all ranks, with what they have written
    before; or negative. ``peers``: int64 addresses of the ranks' memory, and of where a missing one is noted;
    ``signals``: bytes from them to the signals."""
    ranks_N = tl.arange(0, block_ranks)
    is_rank_N = ranks_N < num_ranks
    signals += tl.program_id(0) * num_ranks * 8
    told_N = tl.load(peers + ranks_N, mask=is_rank_N, other=0) + signals + rank * 8
    awaited_N = (tl.load(peers + rank) + signals + ranks_N * 8).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # all threads have written before one of them signals
    tl.atomic_xchg(told_N.to(tl.pointer_type(tl.int64)), turn, mask=is_rank_N, sem="release", scope="sys")
    is_waiting, num_waits, missing = turn > 0, 0, tl.full((), 0, tl.int32)
    while is_waiting:
        # A peer may be a turn ahead already.
        seen_N = tl.atomic_add(awaited_N, 0, mask=is_rank_N, sem="acquire", scope="sys")
        missing = tl.max(tl.where(is_rank_N & (seen_N < turn), ranks_N + 1, 0), 0)
        num_waits += 1
        is_waiting = (missing > 0) & (num_waits < most_waits)
    tl.debug_barrier()  # no thread reads before those that have seen the signals
    note = tl.load(peers + num_ranks).to(tl.pointer_type(tl.int64))
    tl.store(note, missing.to(tl.int64), mask=missing > 0)
    return tl.where(missing > 0, GIVEN_UP, turn)


@triton.jit
def summed_over_ranks(
    own, places, is_used, peers, turns, rank, most_waits, num_ranks: tl.constexpr,
    block_ranks: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """The float32 sum of all ranks' ``own`` numbers at ``places``, from which they have ``half`` numbers."""
    dtype: tl.constexpr = own.dtype
    turn = tl.load(turns + tl.program_id(0)) + 1
    places += (turn & 1) * half
    tl.store(memory_of(peers, rank, dtype) + places, own, mask=is_used)
    terms = memories_of(peers, num_ranks, dtype)
    signals = 2 * half * (dtype.primitive_bitwidth // 8)
    turn = met(peers, signals, turn, rank, most_waits, num_ranks, block_ranks)
    total = tl.zeros_like(own).to(tl.float32)
    for peer in tl.static_range(num_ranks):
        total += tl.load(terms[peer] + places, mask=is_used, other=0.0, volatile=True).to(tl.float32)
    tl.store(turns + tl.program_id(0), turn)
    return tl.where(turn < 0, float("nan"), total)
