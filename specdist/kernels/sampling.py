"""From logits to processed distributions, and draws from them, without a sort and without noise in memory.

They are operators of torch, ``torch.ops.specdist``, so that tools see them as one step each.

Top-k and top-p keep the ids whose score reaches a threshold. It is found by a search over the bits of the
scores,
four at a time: a float's bits, read as an integer, have the order of the floats. All ids that tie with the
threshold are kept. A program works on one row of the vocabulary; its sums have a fixed order, so equal logits
give equal distributions, bit by bit, on every rank.

N distributions, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
# Of a random number in (0, 1), as in specdist.sampling.random.
UNIFORM_BITS = 52
# Registers are not kept few: no program waits for another.
OPTIONS: dict[str, int | bool] = {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False}
DIGIT_BITS = tl.constexpr(4)
NUM_DIGITS = tl.constexpr(8)


@triton.jit
def _sort_keys(scores):
    """int64 in the order of the float32 scores, from 0 to 2**32 - 1."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _largest_reached(
    logits_row,
    num_ids,
    temperature,
    least_key,
    largest,
    wanted,
    block: tl.constexpr,
    by_mass: tl.constexpr,
):
    """The largest sort key c for which the ids with a key of at least c weigh ``wanted`` or more in all.

    An id's weight is 1, or ``by_mass`` exp(score - largest); ids below ``least_key`` have none.
    """
    found = tl.full([], 0, tl.int64)
    digits = tl.arange(0, 16).to(tl.int64)
    for place in tl.static_range(NUM_DIGITS):
        candidates = found + (digits << (32 - DIGIT_BITS * (place + 1)))
        sums = tl.zeros([16], tl.float32)
        for start in range(0, num_ids, block):
            ids = start + tl.arange(0, block)
            scores = tl.load(logits_row + ids, mask=ids < num_ids, other=0.0).to(tl.float32) / temperature
            keys = _sort_keys(scores)
            weights = tl.exp(scores - largest) if by_mass else tl.full([block], 1.0, tl.float32)
            weights = tl.where((ids < num_ids) & (keys >= least_key), weights, 0.0)
            sums += tl.sum(tl.where(keys[:, None] >= candidates[None, :], weights[:, None], 0.0), 0)
        # Sums fall from candidate to candidate, rounding included. The first was reached by the digits
        # before.
        num_reached = tl.sum((sums >= wanted).to(tl.int32), 0)
        found += tl.maximum(num_reached - 1, 0).to(tl.int64) << (32 - DIGIT_BITS * (place + 1))
    return found


@triton.jit
def process_kernel(
    logits,
    probabilities,
    num_ids,
    stride_row,
    temperature,
    top_k,
    top_p,
    block: tl.constexpr,
    has_top_k: tl.constexpr,
    has_top_p: tl.constexpr,
):
    """Grid: (distributions,). Softmax of what temperature, top-k and top-p leave; NaN if a logit is NaN or
    +inf."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * stride_row
    largest_B = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        scores = (
            tl.load(logits_row + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32) / temperature
        )
        largest_B = tl.maximum(largest_B, scores)
    largest = tl.max(largest_B, 0)
    largest_key = tl.max(_sort_keys(tl.maximum(largest_B, largest)), 0)
    least_key = tl.full([], 0, tl.int64)
    if has_top_k:
        least_key = _largest_reached(
            logits_row, num_ids, temperature, least_key, largest, top_k * 1.0, block, False
        )
    if has_top_p:
        total_B = tl.zeros([block], tl.float32)
        for start in range(0, num_ids, block):
            ids = start + tl.arange(0, block)
            scores = tl.load(logits_row + ids, mask=ids < num_ids, other=0.0).to(tl.float32) / temperature
            is_kept = (ids < num_ids) & (_sort_keys(scores) >= least_key)
            total_B += tl.where(is_kept, tl.exp(scores - largest), 0.0)
        # An id is kept if those that are likelier than it have less than top_p of the mass.
        wanted = top_p * tl.sum(total_B, 0)
        least_key = _largest_reached(
            logits_row, num_ids, temperature, least_key, largest, wanted, block, True
        )
    # Rounding, and a top_p of 0, leave the likeliest.
    least_key = tl.minimum(least_key, largest_key)
    total_B = tl.zeros([block], tl.float32)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        scores = tl.load(logits_row + ids, mask=ids < num_ids, other=0.0).to(tl.float32) / temperature
        # Not "below the threshold": a NaN has to be among the kept, and to spoil the sum.
        is_kept = (ids < num_ids) & ~(_sort_keys(scores) < least_key)
        total_B += tl.where(is_kept | (scores != scores), tl.exp(scores - largest), 0.0)
    total = tl.sum(total_B, 0)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        scores = tl.load(logits_row + ids, mask=ids < num_ids, other=0.0).to(tl.float32) / temperature
        kept = tl.where(_sort_keys(scores) < least_key, 0.0, tl.exp(scores - largest))
        tl.store(probabilities + row * num_ids + ids, kept / total, mask=ids < num_ids)


@triton.jit
def draw_kernel(probabilities, uniforms, drawn, num_ids, not_finite, block: tl.constexpr):
    """Grid: (distributions,). The first id whose cumulative mass exceeds u × total, in float64."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
        total += tl.sum(masses, 0)
    wanted = tl.load(uniforms + row) * total
    before = tl.full([], 0.0, tl.float64)
    # Where rounding leaves nothing above, the last id that has mass.
    found = tl.full([], 0, tl.int32)
    is_found = tl.full([], 0, tl.int32)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
        is_above = (before + tl.cumsum(masses, 0) > wanted) & (masses > 0)
        first = tl.min(tl.where(is_above, ids, num_ids), 0)
        last = tl.max(tl.where(masses > 0, ids, 0), 0)
        found = tl.where(is_found == 1, found, tl.where(first < num_ids, first, tl.maximum(found, last)))
        is_found = tl.maximum(is_found, (first < num_ids).to(tl.int32))
        before += tl.sum(masses, 0)
    tl.store(drawn + row, tl.where(total > 0, found, not_finite).to(tl.int64))


@triton.jit
def _mix(words):
    """SplitMix64's finaliser."""
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def race_kernel(
    probabilities, words, drawn, num_ids, first_id, not_finite, block: tl.constexpr, unit: tl.constexpr
):
    """Grid: (distributions,). argmax P / E with the waiting times of ``sampling.coupling``, in float64."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(words + row).to(tl.uint64, bitcast=True)
    best = tl.full([], -1.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    sum_B = tl.zeros([block], tl.float32)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0)
        steps = (ids + first_id + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        numbers = ((_mix(word + steps) >> 12).to(tl.float64) + 0.5) * unit
        speeds = tl.where(masses > 0, masses.to(tl.float64) / -tl.log(numbers), -1.0)
        fastest = tl.max(speeds, 0)
        first = tl.min(tl.where(speeds == fastest, ids, num_ids), 0)
        winner = tl.where(fastest > best, first, winner)
        best = tl.maximum(best, fastest)
        sum_B += masses
    # A NaN among the probabilities makes the sum NaN.
    tl.store(drawn + row, tl.where(tl.sum(sum_B, 0) > 0, winner, not_finite).to(tl.int64))


@torch.library.custom_op("specdist::processed_probabilities", mutates_args=())
def processed_probabilities(logits_NV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """float32 [N, V]: temperature, then top-k (0 = all), then top-p (1 = all), then softmax."""
    num_rows, num_ids = logits_NV.shape
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    probabilities_NV = torch.empty(num_rows, num_ids, dtype=torch.float32, device=logits_NV.device)
    if num_rows:
        process_kernel[(num_rows,)](
            logits_NV,
            probabilities_NV,
            num_ids,
            logits_NV.stride(0),
            temperature,
            top_k,
            top_p,
            block=BLOCK,
            has_top_k=0 < top_k < num_ids,
            has_top_p=top_p < 1,
            **OPTIONS,
        )
    return probabilities_NV


@torch.library.custom_op("specdist::draw", mutates_args=())
def draw(probabilities_NV: Tensor, uniforms_N: Tensor, *, not_finite: int) -> Tensor:
    """int64 ids [N] by the inverse of the cumulative distribution; ``not_finite`` where a row has no mass.

    Args:
        uniforms_N: float64 in [0, 1).
    """
    drawn_N = torch.empty(len(probabilities_NV), dtype=torch.int64, device=probabilities_NV.device)
    if len(drawn_N):
        draw_kernel[(len(drawn_N),)](
            probabilities_NV.contiguous(),
            uniforms_N,
            drawn_N,
            probabilities_NV.shape[1],
            not_finite,
            block=BLOCK,
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
    drawn_N = torch.empty(len(probabilities_NV), dtype=torch.int64, device=probabilities_NV.device)
    if len(drawn_N):
        race_kernel[(len(drawn_N),)](
            probabilities_NV.contiguous(),
            words_N,
            drawn_N,
            probabilities_NV.shape[1],
            first_id,
            not_finite,
            block=BLOCK,
            unit=2.0**-UNIFORM_BITS,
            **OPTIONS,
        )
    return drawn_N
