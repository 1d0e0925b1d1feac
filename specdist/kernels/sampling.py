"""From logits to processed distributions, and draws from them, without a sort and without noise in memory.

They are operators of torch, ``torch.ops.specdist``, so that tools see them as one step each.

Top-k and top-p keep the ids whose logit reaches a threshold. Usually few ids near the largest logit decide
it: they are listed first. The threshold is found by a search over the bits of the listed logits, four at a
time: a float's bits, read as an integer, have the order of the floats. All ids that tie with the threshold
are kept. A program works on one row of the vocabulary; its sums have a fixed order, so equal logits give
equal distributions, bit by bit, on every rank.

N distributions, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of a random number in (0, 1), as in specdist.sampling.random.
UNIFORM_BITS = 52
NUM_WARPS = 16
OPTIONS: dict[str, int | bool] = {"num_warps": NUM_WARPS, "maxnreg": 128, "enable_fp_fusion": False}
# Two programs fit on a multiprocessor: some of their warps run while others wait for memory.
PROCESS_OPTIONS = OPTIONS | {"maxnreg": 64}
BLOCK = 2048
# Ids of a block while logits are processed: one for each thread. No number then changes its thread, which
# takes barriers in every step of a loop. So many blocks are read before the first is used.
THREADS = 32 * NUM_WARPS
NUM_READ = tl.constexpr(8)
# Ids whose score is less than the largest by more, in nats, have less than 1 / 2,900 of its probability.
NEAR = tl.constexpr(8.0)
LOG2_E = tl.constexpr(math.log2(math.e))
DIGIT_BITS = tl.constexpr(4)
# So many distinguish all numbers of a dtype as float32: sign, exponent and the dtype's mantissa.
NUM_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
KEY_OF_MINUS_INFINITY, KEY_OF_INFINITY = tl.constexpr(0x007FFFFF), tl.constexpr(0xFF800000)


@triton.jit
def _sort_keys(numbers):
    """uint32 in the order of the float32 numbers."""
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _number_of(key):
    """The float32 number that has this sort key."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -0x80000000, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _read(numbers_row, start, num_ids, threads: tl.constexpr):
    """``NUM_READ`` blocks in float32; -inf after the last id."""
    numbers = ()
    for index in tl.static_range(NUM_READ):
        ids = start + index * threads + tl.arange(0, threads)
        block = tl.load(numbers_row + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32)
        numbers += (block,)  # type: ignore[assignment]
    return numbers


@triton.jit
def _masses(numbers, largest, sharpness):
    """exp of (score - largest score), from logits; ``sharpness``: of exponents of base 2."""
    return tl.exp2((numbers - largest) * sharpness)


@triton.jit
def _mass(logits_row, num_ids, largest, sharpness, least, threads: tl.constexpr):
    """Of the ids with a logit of at least ``least``."""
    masses_B = tl.zeros([threads], tl.float32)
    for start in range(0, num_ids, NUM_READ * threads):
        parts = _read(logits_row, start, num_ids, threads)
        for index in tl.static_range(NUM_READ):
            numbers = parts[index]
            masses_B += tl.where(numbers >= least, _masses(numbers, largest, sharpness), 0.0)
    return tl.sum(masses_B, 0)


@triton.jit
def _list_near(logits_row, listed, num_ids, largest, sharpness, least, threads: tl.constexpr):
    """Writes the logits of at least ``least`` to ``listed``, and -inf between them.

    Every thread has places of its own, one in each round, so that none has to know how many others have
    found. Returns how many places that takes, how many logits they are, their mass and that of all ids.
    """
    lanes_B = tl.arange(0, threads)
    counts_B = tl.zeros([threads], tl.int32)
    masses_B = tl.zeros([threads], tl.float32)
    total_B = tl.zeros([threads], tl.float32)
    for start in range(0, num_ids, NUM_READ * threads):
        parts = _read(logits_row, start, num_ids, threads)
        for index in tl.static_range(NUM_READ):
            numbers = parts[index]
            masses = _masses(numbers, largest, sharpness)
            is_near = (numbers >= least) & (start + index * threads + lanes_B < num_ids)
            tl.store(listed + counts_B * threads + lanes_B, numbers, mask=is_near)
            counts_B += is_near.to(tl.int32)
            masses_B += tl.where(is_near, masses, 0.0)
            total_B += masses
    num_rounds = tl.max(counts_B, 0)
    for index in range(num_rounds):
        places = index * threads + lanes_B
        tl.store(listed + places, float("-inf"), mask=(counts_B <= index) & (places < num_ids))
    # Other threads of the program will read what these have written.
    tl.debug_barrier()
    num_places = tl.minimum(num_rounds * threads, num_ids)
    return num_places, tl.sum(counts_B, 0), tl.sum(masses_B, 0), tl.sum(total_B, 0)


@triton.jit
def _largest_reached(
    logits_row,
    num_ids,
    largest,
    sharpness,
    least,
    wanted,
    num_digits: tl.constexpr,
    threads: tl.constexpr,
    by_mass: tl.constexpr,
):
    """The largest number c for which the ids with a logit of at least c weigh ``wanted`` or more in all.

    An id's weight is 1, or ``by_mass`` its mass; ids below ``least`` have none.
    """
    found = tl.full([], 0, tl.uint32)
    digits_D = tl.arange(0, 16).to(tl.uint32)
    for place in range(num_digits):
        shift = 32 - DIGIT_BITS * (place + 1)
        candidates_D = found + (digits_D << shift)
        sums_DB = tl.zeros([16, threads], tl.float32)
        for start in range(0, num_ids, threads):
            ids = start + tl.arange(0, threads)
            numbers = tl.load(logits_row + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32)
            keys = _sort_keys(numbers)
            weights = _masses(numbers, largest, sharpness) if by_mass else tl.full([threads], 1.0, tl.float32)
            weights = tl.where(numbers >= least, weights, 0.0)
            sums_DB += tl.where(keys[None, :] >= candidates_D[:, None], weights[None, :], 0.0)
        # Sums fall from candidate to candidate, rounding included. The first was reached by the digits
        # before.
        num_reached = tl.sum((tl.sum(sums_DB, 1) >= wanted).to(tl.int32), 0)
        found += tl.maximum(num_reached - 1, 0).to(tl.uint32) << shift
    return _number_of(tl.minimum(tl.maximum(found, KEY_OF_MINUS_INFINITY), KEY_OF_INFINITY))


# Whether 16 divides the number of ids changes nothing: it compiles nothing anew.
@triton.jit(do_not_specialize=["num_ids"])
def process_kernel(
    logits,
    probabilities,
    num_ids,
    stride_row,
    temperature,
    top_k,
    top_p,
    threads: tl.constexpr,
    num_digits: tl.constexpr,
    has_top_k: tl.constexpr,
    has_top_p: tl.constexpr,
):
    """Grid: (distributions,). Softmax of what temperature, top-k and top-p leave; NaN if a logit is NaN or
    +inf."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * stride_row
    output_row = probabilities + row * num_ids
    sharpness = LOG2_E / temperature
    largest_B = tl.full([threads], float("-inf"), tl.float32)
    for start in range(0, num_ids, NUM_READ * threads):
        parts = _read(logits_row, start, num_ids, threads)
        for index in tl.static_range(NUM_READ):
            largest_B = tl.maximum(largest_B, parts[index])
    largest = tl.max(largest_B, 0)
    least = float("-inf")
    if has_top_k or has_top_p:
        # The list lies where the probabilities will be.
        listed = output_row.to(logits.dtype)
        limit = largest - NEAR * temperature
        num_listed, num_near, mass, total = _list_near(
            logits_row, listed, num_ids, largest, sharpness, limit, threads
        )
        is_enough = num_near >= top_k if has_top_k else mass >= top_p * total
        if not is_enough:
            listed, num_listed, limit = logits_row, num_ids, float("-inf")
        shared = (listed, num_listed, largest, sharpness)
        if has_top_k:
            least = _largest_reached(*shared, least, top_k * 1.0, num_digits, threads, False)
        if has_top_p:
            # An id is kept if those that are likelier than it have less than top_p of the mass.
            wanted = top_p * (_mass(*shared, least, threads) if has_top_k else total)
            least = tl.maximum(_largest_reached(*shared, least, wanted, num_digits, threads, True), least)
        # Rounding, and a top_p of 0, leave the likeliest, and none that is not listed.
        least = tl.minimum(tl.maximum(least, limit), largest)
        # A NaN has to spoil the sum.
        total = _mass(*shared, least, threads) + (total - total)
        # No thread reads the list any more.
        tl.debug_barrier()
    else:
        total = _mass(logits_row, num_ids, largest, sharpness, least, threads)
    for start in range(0, num_ids, NUM_READ * threads):
        parts = _read(logits_row, start, num_ids, threads)
        for index in tl.static_range(NUM_READ):
            ids = start + index * threads + tl.arange(0, threads)
            kept = tl.where(parts[index] < least, 0.0, _masses(parts[index], largest, sharpness))
            tl.store(output_row + ids, kept / total, mask=ids < num_ids)


@triton.jit(do_not_specialize=["num_ids"])
def draw_kernel(
    probabilities, uniforms, drawn, num_ids, not_finite, block: tl.constexpr, num_blocks: tl.constexpr
):
    """Grid: (distributions,). The first id whose cumulative mass exceeds u × total, in float64."""
    row = tl.program_id(0).to(tl.int64)
    masses_row = probabilities + row * num_ids
    blocks_C = tl.arange(0, num_blocks)
    masses_C = tl.zeros([num_blocks], tl.float64)
    for index in range(tl.cdiv(num_ids, block)):
        ids = index * block + tl.arange(0, block)
        masses = tl.load(masses_row + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
        masses_C = tl.where(blocks_C == index, tl.sum(masses, 0), masses_C)
    total = tl.sum(masses_C, 0)
    wanted = tl.load(uniforms + row) * total
    # Where rounding leaves nothing above, the last id that has mass.
    last_block = tl.max(tl.where(masses_C > 0, blocks_C, 0), 0)
    is_above_C = (tl.cumsum(masses_C, 0) > wanted) & (masses_C > 0)
    chosen = tl.min(tl.where(is_above_C, blocks_C, last_block), 0)
    before = tl.sum(tl.where(blocks_C < chosen, masses_C, 0.0), 0)
    ids = chosen * block + tl.arange(0, block)
    masses = tl.load(masses_row + ids, mask=ids < num_ids, other=0.0).to(tl.float64)
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


@triton.jit
def race_kernel(
    probabilities, words, drawn, num_ids, first_id, not_finite, block: tl.constexpr, unit: tl.constexpr
):
    """Grid: (distributions,). argmax P / E with the waiting times of ``sampling.coupling``, in float64."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(words + row).to(tl.uint64, bitcast=True)
    # Of every lane.
    best_B = tl.full([block], -1.0, tl.float64)
    winner_B = tl.full([block], 0, tl.int32)
    sum_B = tl.zeros([block], tl.float32)
    for start in range(0, num_ids, block):
        ids = start + tl.arange(0, block)
        masses = tl.load(probabilities + row * num_ids + ids, mask=ids < num_ids, other=0.0)
        steps = (ids + first_id + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        numbers = ((_mix(word + steps) >> 12).to(tl.float64) + 0.5) * unit
        speeds = tl.where(masses > 0, masses.to(tl.float64) / -tl.log(numbers), -1.0)
        winner_B = tl.where(speeds > best_B, ids, winner_B)
        best_B = tl.maximum(best_B, speeds)
        sum_B += masses
    winner = tl.min(tl.where(best_B == tl.max(best_B, 0), winner_B, num_ids), 0)
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
            threads=THREADS,
            num_digits=NUM_DIGITS[logits_NV.dtype],
            has_top_k=0 < top_k < num_ids,
            has_top_p=top_p < 1,
            **PROCESS_OPTIONS,
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
        num_ids = probabilities_NV.shape[1]
        draw_kernel[(len(drawn_N),)](
            probabilities_NV.contiguous(),
            uniforms_N,
            drawn_N,
            num_ids,
            not_finite,
            block=BLOCK,
            num_blocks=triton.next_power_of_2(triton.cdiv(num_ids, BLOCK)),
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
