"""From logits to processed distributions without a sort, as one operator of torch, ``torch.ops.specdist``.

A row of the vocabulary is cut into parts, each read by a program of its own; what these find is noted, and
joined by the programs of the next kernel. Top-k and top-p keep the ids whose logit reaches a threshold. Sums
at a few limits below the largest logit tell between which two of them it lies. The logits there are listed,
and the list is searched over their bits, four at a time: a float's bits, read as an integer, have the order
of the floats. All ids that tie with the threshold are kept. The order of a sum follows from the vocabulary's
size alone, so equal logits give equal distributions, bit by bit, on every rank.

N distributions, V vocabulary, P parts of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 8
OPTIONS: dict[str, int | bool] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
# Ids of a part.
BLOCK = 4096
# Logits of a list, one for each thread: no number then changes its thread, which takes barriers in every step
# of a loop. So many of these blocks are read before the first is used.
THREADS, NUM_READ = 32 * NUM_WARPS, tl.constexpr(4)
LOG2_E = tl.constexpr(math.log2(math.e))
# The first limit is a quarter of a nat below the largest score, each further one twice as far.
NUM_LIMITS, NEAREST = tl.constexpr(8), tl.constexpr(0.25)
DIGIT_BITS = tl.constexpr(4)
# The digits that distinguish all numbers of a dtype as float32: sign, exponent and the dtype's mantissa.
NUM_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
KEY_OF_MINUS_INFINITY, KEY_OF_INFINITY = tl.constexpr(0x007FFFFF), tl.constexpr(0xFF800000)
# What is noted of a row, float32 [P] each: a part's largest logit, its mass beside that, how many of its
# logits are listed, and of those that reach each limit how many they are or what they weigh. Of the row: the
# least logit that is kept, and the mass of all that are.
LARGEST, MASS, NUM_LISTED, LEAST, KEPT, REACHED = (tl.constexpr(place) for place in range(6))
NUM_NOTES = tl.constexpr(REACHED.value + NUM_LIMITS.value)


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
def _masses(numbers, largest, temperature):
    """exp of (score - largest score), from logits."""
    return tl.exp2((numbers - largest) * (LOG2_E / temperature))


@triton.jit
def _read_part(logits, num_ids, stride_row, block: tl.constexpr):
    """This program's ids and their logits in float32; -inf after the last id."""
    ids = tl.program_id(1) * block + tl.arange(0, block)
    logits_row = logits + tl.program_id(0).to(tl.int64) * stride_row
    return ids, tl.load(logits_row + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32)


@triton.jit
def _note(notes, num_parts, which):
    """Where this row's numbers of a kind are, the first part's first."""
    return notes + (tl.program_id(0) * NUM_NOTES + which) * num_parts


# Whether 16 divides a number changes nothing: it compiles nothing anew.
@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def survey_kernel(logits, notes, num_ids, num_parts, stride_row, temperature, block: tl.constexpr):
    """Grid: (distributions, parts). The largest logit of each part, and the part's mass beside it."""
    _, numbers = _read_part(logits, num_ids, stride_row, block)
    largest = tl.max(numbers, 0)
    masses = _masses(numbers, tl.where(largest == float("-inf"), 0.0, largest), temperature)
    tl.store(_note(notes, num_parts, LARGEST) + tl.program_id(1), largest)
    tl.store(_note(notes, num_parts, MASS) + tl.program_id(1), tl.sum(masses, 0))


@triton.jit
def _survey(notes, num_parts, temperature, parts: tl.constexpr):
    """A row's largest logit, and its mass: NaN if a logit is NaN or +inf, or all are -inf."""
    parts_P = tl.arange(0, parts)
    is_part = parts_P < num_parts
    largest_P = tl.load(_note(notes, num_parts, LARGEST) + parts_P, mask=is_part, other=float("-inf"))
    masses_P = tl.load(_note(notes, num_parts, MASS) + parts_P, mask=is_part, other=0.0)
    largest = tl.max(largest_P, 0)
    return largest, tl.sum(masses_P * _masses(largest_P, largest, temperature), 0)


@triton.jit
def _limit(index, largest, temperature):
    return largest - NEAREST * tl.exp2(index.to(tl.float32)) * temperature


@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def weigh_kernel(
    logits,
    notes,
    num_ids,
    num_parts,
    stride_row,
    temperature,
    has_top_k: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
):
    """Grid: (distributions, parts). Of each part's ids that reach a limit how many they are, or, without
    top-k, their mass."""
    _, numbers = _read_part(logits, num_ids, stride_row, block)
    largest, _ = _survey(notes, num_parts, temperature, parts)
    weights = tl.full([block], 1.0, tl.float32) if has_top_k else _masses(numbers, largest, temperature)
    for index in tl.static_range(NUM_LIMITS):
        limit = _limit(tl.full([], index, tl.int32), largest, temperature)
        sum = tl.sum(tl.where(numbers >= limit, weights, 0.0), 0)
        tl.store(_note(notes, num_parts, REACHED + index) + tl.program_id(1), sum)


@triton.jit
def _bracket(notes, wanted, largest, temperature, num_parts, has_top_k: tl.constexpr, parts: tl.constexpr):
    """Two limits between which the threshold is, and what ids from the upper one on weigh. With top-k that is
    infinity: all that are kept are listed, since their mass is wanted, too."""
    limits_L, parts_P = tl.arange(0, NUM_LIMITS), tl.arange(0, parts)
    places_LP = limits_L[:, None] * num_parts + parts_P[None, :]
    is_part = (parts_P < num_parts)[None, :]
    sums_L = tl.sum(tl.load(_note(notes, num_parts, REACHED) + places_LP, mask=is_part, other=0.0), 1)
    # They rise from limit to limit, rounding included.
    num_short = tl.sum((sums_L < wanted).to(tl.int32), 0)
    lower = tl.where(num_short < NUM_LIMITS, _limit(num_short, largest, temperature), float("-inf"))
    is_limited = (num_short > 0) & (not has_top_k)
    upper = tl.where(is_limited, _limit(num_short - 1, largest, temperature), float("inf"))
    above = tl.sum(tl.where((limits_L == num_short - 1) & is_limited, sums_L, 0.0), 0)
    return lower, upper, above


@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def list_kernel(
    logits,
    notes,
    listed,
    num_ids,
    num_parts,
    stride_row,
    stride_list,
    temperature,
    top_k,
    top_p,
    has_top_k: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
):
    """Grid: (distributions, parts). Each part's logits between the two limits, one after the other, where the
    part's probabilities will be."""
    ids, numbers = _read_part(logits, num_ids, stride_row, block)
    largest, total = _survey(notes, num_parts, temperature, parts)
    wanted = top_k * 1.0 if has_top_k else top_p * total
    lower, upper, _ = _bracket(notes, wanted, largest, temperature, num_parts, has_top_k, parts)
    is_listed = (numbers >= lower) & (numbers < upper) & (ids < num_ids)
    places = tl.program_id(1) * block + tl.cumsum(is_listed.to(tl.int32), 0) - 1
    listed_row = listed + tl.program_id(0).to(tl.int64) * stride_list
    tl.store(listed_row + places, numbers.to(logits.dtype.element_ty), mask=is_listed)
    num_listed = tl.sum(is_listed.to(tl.int32), 0).to(tl.float32)
    tl.store(_note(notes, num_parts, NUM_LISTED) + tl.program_id(1), num_listed)


@triton.jit
def _read_list(listed_row, firsts_B, counts_B, step, columns: tl.constexpr):
    """``NUM_READ`` blocks in float32, each of the next few logits of all parts; -inf after a part's last."""
    numbers = ()
    for index in tl.static_range(NUM_READ):
        columns_B = (step * NUM_READ + index) * columns + tl.arange(0, counts_B.shape[0]) % columns
        block = tl.load(listed_row + firsts_B + columns_B, mask=columns_B < counts_B, other=float("-inf"))
        numbers += (block.to(tl.float32),)  # type: ignore[assignment]
    return numbers


@triton.jit
def _mass(listed_row, firsts_B, counts_B, num_rounds, largest, temperature, least, columns: tl.constexpr):
    """Of the listed ids with a logit of at least ``least``."""
    masses_B = tl.zeros(counts_B.shape, tl.float32)
    for step in range(num_rounds):
        parts = _read_list(listed_row, firsts_B, counts_B, step, columns)
        for index in tl.static_range(NUM_READ):
            numbers = parts[index]
            masses_B += tl.where(numbers >= least, _masses(numbers, largest, temperature), 0.0)
    return tl.sum(masses_B, 0)


@triton.jit
def _largest_reached(
    listed_row,
    firsts_B,
    counts_B,
    num_rounds,
    largest,
    temperature,
    least,
    upper,
    above,
    wanted,
    num_digits: tl.constexpr,
    columns: tl.constexpr,
    by_mass: tl.constexpr,
):
    """The largest number c for which the listed ids with a logit of at least c, and those above, weigh
    ``wanted`` or more in all.

    It is from ``least`` to ``upper``: digits that these share are its own. An id's weight is 1, or
    ``by_mass`` its mass; ids below ``least`` have none.
    """
    found = tl.full([], 0, tl.uint32)
    digits_D = tl.arange(0, 16).to(tl.uint32)
    for place in range(num_digits):
        shift = 32 - DIGIT_BITS * (place + 1)
        known = _sort_keys(least) >> shift
        if known == _sort_keys(upper) >> shift:
            found = known << shift
        else:
            candidates_D = found + (digits_D << shift)
            sums_DB = tl.zeros([16, counts_B.shape[0]], tl.float32)
            for step in range(num_rounds):
                parts = _read_list(listed_row, firsts_B, counts_B, step, columns)
                for index in tl.static_range(NUM_READ):
                    numbers = parts[index]
                    weights = tl.full(counts_B.shape, 1.0, tl.float32)
                    if by_mass:
                        weights = _masses(numbers, largest, temperature)
                    weights = tl.where(numbers >= least, weights, 0.0)
                    is_reached_DB = _sort_keys(numbers)[None, :] >= candidates_D[:, None]
                    sums_DB += tl.where(is_reached_DB, weights[None, :], 0.0)
            # Sums fall from candidate to candidate, rounding included. The first was reached by the digits
            # before.
            num_reached = tl.sum((above + tl.sum(sums_DB, 1) >= wanted).to(tl.int32), 0)
            found += tl.maximum(num_reached - 1, 0).to(tl.uint32) << shift
    return _number_of(tl.minimum(tl.maximum(found, KEY_OF_MINUS_INFINITY), KEY_OF_INFINITY))


@triton.jit(do_not_specialize=["num_parts"])
def search_kernel(
    listed,
    notes,
    num_parts,
    stride_list,
    temperature,
    top_k,
    top_p,
    num_digits: tl.constexpr,
    has_top_k: tl.constexpr,
    has_top_p: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    columns: tl.constexpr,
):
    """Grid: (distributions,). The least logit that is kept, and the mass of all that are."""
    largest, total = _survey(notes, num_parts, temperature, parts)
    wanted = top_k * 1.0 if has_top_k else top_p * total
    least, upper, above = _bracket(notes, wanted, largest, temperature, num_parts, has_top_k, parts)
    parts_B = tl.arange(0, parts * columns) // columns
    counts_B = tl.load(_note(notes, num_parts, NUM_LISTED) + parts_B, mask=parts_B < num_parts, other=0.0).to(
        tl.int32
    )
    listed_row, firsts_B = listed + tl.program_id(0).to(tl.int64) * stride_list, parts_B * block
    num_rounds = tl.cdiv(tl.max(counts_B, 0), NUM_READ * columns)
    shared = (listed_row, firsts_B, counts_B, num_rounds, largest, temperature)
    upper = tl.minimum(upper, largest)
    # Rounding, and a top_p of 0, leave the likeliest, and none that is not listed.
    if has_top_k:
        found = _largest_reached(*shared, least, upper, above, wanted, num_digits, columns, False)
        least = tl.minimum(tl.maximum(found, least), largest)
        wanted = top_p * _mass(*shared, least, columns)
    if has_top_p:
        # An id is kept if those that are likelier than it have less than top_p of the mass.
        found = _largest_reached(*shared, least, upper, above, wanted, num_digits, columns, True)
        least = tl.minimum(tl.maximum(found, least), largest)
    # A NaN has to spoil the sum.
    kept = above + _mass(*shared, least, columns) + (total - total)
    tl.store(_note(notes, num_parts, LEAST), least)
    tl.store(_note(notes, num_parts, KEPT), kept)


@triton.jit(do_not_specialize=["num_ids", "num_parts"])
def normalize_kernel(
    logits,
    notes,
    probabilities,
    num_ids,
    num_parts,
    stride_row,
    temperature,
    is_filtered: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
):
    """Grid: (distributions, parts). Softmax of what is kept; NaN if a logit is NaN or +inf."""
    ids, numbers = _read_part(logits, num_ids, stride_row, block)
    largest, total = _survey(notes, num_parts, temperature, parts)
    masses = _masses(numbers, largest, temperature)
    if is_filtered:
        total = tl.load(_note(notes, num_parts, KEPT))
        masses = tl.where(numbers < tl.load(_note(notes, num_parts, LEAST)), 0.0, masses)
    output_row = probabilities + tl.program_id(0).to(tl.int64) * num_ids
    tl.store(output_row + ids, masses / total, mask=ids < num_ids)


def constants(num_ids: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants of the kernels for so many ids."""
    parts = triton.next_power_of_2(triton.cdiv(num_ids, BLOCK))
    columns = max(1, THREADS // parts)
    return {"block": BLOCK, "parts": parts, "columns": columns, "num_digits": NUM_DIGITS[dtype]}


@torch.library.custom_op("specdist::processed_probabilities", mutates_args=())
def processed_probabilities(logits_NV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """float32 [N, V]: temperature, then top-k (0 = all), then top-p (1 = all), then softmax."""
    num_rows, num_ids = logits_NV.shape
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    probabilities_NV = torch.empty(num_rows, num_ids, dtype=torch.float32, device=logits_NV.device)
    if not num_rows:
        return probabilities_NV
    num_parts = triton.cdiv(num_ids, BLOCK)
    has_top_k, has_top_p = 0 < top_k < num_ids, top_p < 1
    notes = torch.empty(num_rows, NUM_NOTES.value, num_parts, dtype=torch.float32, device=logits_NV.device)
    known: dict[str, object] = {
        "num_ids": num_ids,
        "num_parts": num_parts,
        "stride_row": logits_NV.stride(0),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "has_top_k": has_top_k,
        "has_top_p": has_top_p,
        "is_filtered": has_top_k or has_top_p,
        **constants(num_ids, logits_NV.dtype),
    }

    def launch(kernel: Any, *tensors: Tensor, of_parts: bool = True) -> None:
        wanted = {name: known[name] for name in kernel.arg_names if name in known}
        kernel[(num_rows, num_parts) if of_parts else (num_rows,)](*tensors, **wanted, **OPTIONS)

    launch(survey_kernel, logits_NV, notes)
    if has_top_k or has_top_p:
        # The list lies where the probabilities will be.
        listed = probabilities_NV.view(logits_NV.dtype)
        known["stride_list"] = listed.stride(0)
        launch(weigh_kernel, logits_NV, notes)
        launch(list_kernel, logits_NV, notes, listed)
        launch(search_kernel, listed, notes, of_parts=False)
    launch(normalize_kernel, logits_NV, notes, probabilities_NV)
    return probabilities_NV
