"""Distributions, and draws from them without noise in memory, as operators of torch, ``torch.ops.specdist``.

A row of the vocabulary is cut into parts, each read by a program of its own; a program for each row joins
what these find.

N distributions, V vocabulary, P parts of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.filters import BLOCK, OPTIONS, processed_probabilities

__all__ = ["draw", "processed_probabilities", "race"]

# The bits of a random number in (0, 1), as in specdist.sampling.random.
UNIFORM_BITS = 52


# Whether 16 divides a number changes nothing: it compiles nothing anew.
@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def mass_kernel(probabilities, sums, num_ids, num_parts, block: tl.constexpr):
    """Grid: (distributions, parts). The mass of each part, in float64."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
    tl.store(sums + row * num_parts + part, tl.sum(masses, 0))


@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def draw_kernel(
    probabilities,
    sums,
    uniforms,
    drawn,
    num_ids,
    num_parts,
    not_finite,
    block: tl.constexpr,
    parts: tl.constexpr,
):
    """Grid: (distributions,). The first id whose cumulative mass exceeds u × total, in float64."""
    row = tl.program_id(0).to(tl.int64)
    parts_P = tl.arange(0, parts)
    masses_P = tl.load(sums + row * num_parts + parts_P, mask=parts_P < num_parts, other=0.0)
    total = tl.sum(masses_P, 0)
    wanted = tl.load(uniforms + row) * total
    # Where rounding leaves nothing above, the last id that has mass.
    last_part = tl.max(tl.where(masses_P > 0, parts_P, 0), 0)
    is_above_P = (tl.cumsum(masses_P, 0) > wanted) & (masses_P > 0)
    chosen = tl.min(tl.where(is_above_P, parts_P, last_part), 0)
    before = tl.sum(tl.where(parts_P < chosen, masses_P, 0.0), 0)
    ids = chosen * block + tl.arange(0, block)
    masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
    is_above = (before + tl.cumsum(masses, 0) > wanted) & (masses > 0)
    last = tl.max(tl.where(masses > 0, ids, 0), 0)
    found = tl.min(tl.where(is_above, ids, last), 0)
    tl.store(drawn + row, tl.where(total > 0, found, not_finite).to(tl.int64))


@triton.jit
def _mix(words):
    """SplitMix64's finaliser."""
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit(do_not_specialize=["num_ids", "num_parts", "first_id"])
def race_kernel(
    probabilities,
    words,
    speeds,
    winners,
    num_ids,
    num_parts,
    first_id,
    block: tl.constexpr,
    unit: tl.constexpr,
):
    """Grid: (distributions, parts). Of each part the largest P / E with the waiting times of
    ``sampling.coupling``, in float64, and its id; NaN if a probability is NaN, and -1 without mass."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = tl.load(words + row).to(tl.uint64, bitcast=True)
    ids = part * block + tl.arange(0, block)
    masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0)
    steps = (ids + first_id + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    numbers = ((_mix(word + steps) >> 12).to(tl.float64) + 0.5) * unit
    speeds_B = tl.where(masses > 0, masses.to(tl.float64) / -tl.log(numbers), -1.0)
    fastest = tl.max(speeds_B, 0)
    sum = tl.sum(masses, 0)
    tl.store(winners + row * num_parts + part, tl.min(tl.where(speeds_B == fastest, ids, num_ids), 0))
    tl.store(speeds + row * num_parts + part, tl.where(sum >= 0, fastest, float("nan")))


@triton.jit(do_not_specialize=["num_parts"])
def winner_kernel(speeds, winners, drawn, num_parts, not_finite, parts: tl.constexpr):
    """Grid: (distributions,). The id of the fastest of all parts, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    parts_P = tl.arange(0, parts)
    places_P, is_part_P = row * num_parts + parts_P, parts_P < num_parts
    speeds_P = tl.load(speeds + places_P, mask=is_part_P, other=-1.0)
    winners_P = tl.load(winners + places_P, mask=is_part_P, other=0)
    fastest = tl.max(speeds_P, 0)
    winner = tl.min(tl.where(speeds_P == fastest, winners_P, 0x7FFFFFFF), 0)
    # A NaN makes this sum NaN; -1 of all parts says that there is none.
    is_right = (fastest > 0) & (tl.sum(speeds_P, 0) > float("-inf"))
    tl.store(drawn + row, tl.where(is_right, winner, not_finite).to(tl.int64))


@torch.library.custom_op("specdist::draw", mutates_args=())
def draw(probabilities_NV: Tensor, uniforms_N: Tensor, *, not_finite: int) -> Tensor:
    """int64 ids [N] by the inverse of the cumulative distribution; ``not_finite`` where a row has no mass.

    Args:
        uniforms_N: float64 in [0, 1).
    """
    num_rows, num_ids = probabilities_NV.shape
    drawn_N = torch.empty(num_rows, dtype=torch.int64, device=probabilities_NV.device)
    if num_rows:
        probabilities_NV, num_parts = probabilities_NV.contiguous(), triton.cdiv(num_ids, BLOCK)
        sums_NP = torch.empty(num_rows, num_parts, dtype=torch.float64, device=probabilities_NV.device)
        mass_kernel[(num_rows, num_parts)](
            probabilities_NV, sums_NP, num_ids, num_parts, block=BLOCK, **OPTIONS
        )
        draw_kernel[(num_rows,)](
            probabilities_NV,
            sums_NP,
            uniforms_N,
            drawn_N,
            num_ids,
            num_parts,
            not_finite,
            block=BLOCK,
            parts=triton.next_power_of_2(num_parts),
            **OPTIONS,
        )
    return drawn_N


@torch.library.custom_op("specdist::race", mutates_args=())
def race(probabilities_NV: Tensor, words_N: Tensor, *, not_finite: int, first_id: int = 0) -> Tensor:
    """int64 ids [N]: the draws that target and draft share, as
    :func:`specdist.sampling.coupling.coupled_draws`.

    Args:
        words_N: int64 random words, of each position.
        first_id: of the vocabulary's slice that the probabilities are of.
    """
    num_rows, num_ids = probabilities_NV.shape
    drawn_N = torch.empty(num_rows, dtype=torch.int64, device=probabilities_NV.device)
    if num_rows:
        num_parts = triton.cdiv(num_ids, BLOCK)
        speeds_NP = torch.empty(num_rows, num_parts, dtype=torch.float64, device=probabilities_NV.device)
        winners_NP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=probabilities_NV.device)
        race_kernel[(num_rows, num_parts)](
            probabilities_NV.contiguous(),
            words_N,
            speeds_NP,
            winners_NP,
            num_ids,
            num_parts,
            first_id,
            block=BLOCK,
            unit=2.0**-UNIFORM_BITS,
            **OPTIONS,
        )
        winner_kernel[(num_rows,)](
            speeds_NP,
            winners_NP,
            drawn_N,
            num_parts,
            not_finite,
            parts=triton.next_power_of_2(num_parts),
            **OPTIONS,
        )
    return drawn_N
