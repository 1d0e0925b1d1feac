"""A sum over the ranks of a group inside of a kernel, by memory that peers read and signal.

A rank's memory has two halves of numbers, and a signal of each program and rank. A program writes its term
into the half of its turn, signals all ranks, waits for their signals of this turn, and adds the terms in the
order of the ranks, so that all have the same bits. A half is written again two turns later, when each peer
has signalled the turn between, which it does after the kernel that read the half. Programs count their turns
in memory of the device, so that a recorded call goes on counting. They wait for those of the same number, so
no more may be started than a device runs at once; where it is not known that signals come, they look for
them ``most_waits`` times, and then give wrong sums. References: torch's one-shot all-reduce
(``CUDASymmetricMemoryOps.cu``); PTX's memory model.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed_over_ranks(
    own, places, is_used, peers, turns, rank, most_waits, num_ranks: tl.constexpr,
    block_ranks: tl.constexpr, half: tl.constexpr,
):  # fmt: skip
    """The float32 sum of all ranks' ``own`` numbers at ``places``, from which they have ``half`` numbers;
    0 ``most_waits``: without end."""
    dtype: tl.constexpr = own.dtype
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    places += (turn & 1) * half
    mine = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(dtype)), 16)
    tl.store(mine + places, own, mask=is_used)
    ranks_N = tl.arange(0, block_ranks)
    is_rank_N = ranks_N < num_ranks
    begin = 2 * half * (dtype.primitive_bitwidth // 8) + program * num_ranks * 8
    signals_N = tl.load(peers + ranks_N, mask=is_rank_N, other=0) + begin + rank * 8
    terms = ()
    for peer in tl.static_range(num_ranks):
        term = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(dtype)), 16)
        terms = terms + (term,)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()  # all threads have written before one of them signals
    tl.atomic_xchg(signals_N.to(tl.pointer_type(tl.int64)), turn, mask=is_rank_N, sem="release", scope="sys")
    awaited_N = (tl.load(peers + rank) + begin + ranks_N * 8).to(tl.pointer_type(tl.int64))
    is_waiting, num_waits = True, 0
    while is_waiting:
        # A peer may be a turn ahead already.
        seen_N = tl.atomic_add(awaited_N, 0, mask=is_rank_N, sem="acquire", scope="sys")
        is_waiting = tl.min(tl.where(is_rank_N, seen_N, turn), 0) < turn
        num_waits += 1
        is_waiting &= (most_waits == 0) | (num_waits < most_waits)
    tl.debug_barrier()  # no thread reads before those that have seen the signals
    total = tl.zeros_like(own).to(tl.float32)
    for peer in tl.static_range(num_ranks):
        total += tl.load(terms[peer] + places, mask=is_used, other=0.0, volatile=True).to(tl.float32)
    tl.store(turns + program, turn)
    return total
