"""Which experts tokens are sent to, tokens in the order of their experts, products with those, whose numbers
are read as they are stored, and the sum of what a token's experts give: one launch each for a layer.

Tokens are sorted by expert. A program takes some tokens of one expert and some of its outputs, and
dequantises one tile of weights after the other. How many programs there are depends on the number of
tokens alone, so that a launch can be recorded: which tokens are whose is read on the device.

S sorted tokens, E experts, N outputs, K inputs, A × B scales of an expert, T tokens, C chosen, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdist.kernels.float8_cache import of_bits
from specdist.kernels.layers import _rounded
from specdist.kernels.paged_attention import _dot

# Tokens of a program, where an expert has few or many of them on average (with float32 these do not fit into
# the registers); outputs, and inputs of a step.
FEW_TOKENS, MANY_TOKENS, BLOCK_OUTPUTS, BLOCK_INPUTS = 16, 64, 64, 128
OPTIONS: dict[str, int | bool] = {"num_warps": 4, "num_stages": 3}
# Pairs of a token and its expert that a program sorts, those compared with them at a time; numbers of a row.
BLOCK_PAIRS, BLOCK_OTHERS, BLOCK_WIDTH = 16, 256, 1024
# Below the rank of every score, and the id that is the last of equal ones.
LEAST, LAST = tl.constexpr(-(2**63)), tl.constexpr(2**31 - 1)


@triton.jit
def _values(codes, numbers: tl.constexpr):
    """float32 of the bits of stored numbers."""
    if numbers == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    if numbers == "int4":
        return codes.to(tl.float32) - 8.0
    if numbers == "float4":
        bits = codes.to(tl.int16)
        # As with numbers in 8 bits.
        return ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return of_bits(codes)


@triton.jit
def _spread(scales, block_outputs: tl.constexpr, block_inputs: tl.constexpr, num_groups: tl.constexpr):
    """[N, groups] over the [N, K] numbers of a tile."""
    wide = tl.broadcast_to(scales[:, :, None], (block_outputs, num_groups, block_inputs // num_groups))
    return tl.reshape(wide, (block_outputs, block_inputs))


@triton.jit
def own_tokens(ends, num_experts: tl.constexpr, block_experts: tl.constexpr, block_tokens: tl.constexpr):
    """This program's expert, its first token and the end of that expert's: each has blocks of its own, one
    after the other, and after those of the last there is none."""
    experts_E = tl.arange(0, block_experts)
    is_expert = experts_E < num_experts
    ends_E = tl.load(ends + experts_E, mask=is_expert, other=0)
    begins_E = tl.load(ends + experts_E - 1, mask=is_expert & (experts_E > 0), other=0)
    num_blocks_E = tl.where(is_expert, (ends_E - begins_E + block_tokens - 1) // block_tokens, 0)
    expert = tl.sum((tl.cumsum(num_blocks_E, 0) <= tl.program_id(1)).to(tl.int32), 0)
    block = tl.program_id(1) - tl.sum(tl.where(experts_E < expert, num_blocks_E, 0), 0)
    is_own = expert < num_experts
    begin = tl.load(ends + expert - 1, mask=is_own & (expert > 0), other=0) + block * block_tokens
    return expert, begin, tl.load(ends + expert, mask=is_own, other=0)


@triton.jit
def grouped_product_kernel(
    inputs, numbers, scales, zeros, ends, output, kind: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr, has_powers: tl.constexpr, num_experts: tl.constexpr, num_outputs: tl.constexpr,
    num_inputs: tl.constexpr, block_experts: tl.constexpr, block_tokens: tl.constexpr,
    block_outputs: tl.constexpr, block_inputs: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of outputs, blocks of tokens)."""
    expert, begin, end = own_tokens(ends, num_experts, block_experts, block_tokens)
    if begin >= end:
        return
    per_byte: tl.constexpr = 2 if kind == "int4" or kind == "float4" else 1
    num_scales: tl.constexpr = (num_inputs + columns - 1) // columns
    num_groups: tl.constexpr = block_inputs // columns if columns < block_inputs else 1
    row_bytes: tl.constexpr = num_inputs // per_byte
    tokens_S = begin + tl.arange(0, block_tokens)
    outputs_N = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    is_output = outputs_N < num_outputs
    from_inputs = inputs + tokens_S.to(tl.int64)[None, :] * num_inputs
    from_numbers = numbers + (expert.to(tl.int64) * num_outputs + outputs_N)[:, None] * row_bytes
    rows_N = expert.to(tl.int64) * ((num_outputs + rows - 1) // rows) + outputs_N // rows
    dtype: tl.constexpr = inputs.dtype.element_ty
    sums = tl.zeros((block_outputs, block_tokens), tl.float32)
    for first in range(0, num_inputs, block_inputs):
        inputs_K = first + tl.arange(0, block_inputs)
        is_read = (inputs_K < num_inputs)[:, None] & (tokens_S < end)[None, :]
        x_KS = tl.load(from_inputs + inputs_K[:, None], mask=is_read, other=0.0)
        bytes_K = first // per_byte + tl.arange(0, block_inputs // per_byte)
        is_read = is_output[:, None] & (bytes_K < row_bytes)[None, :]
        codes = tl.load(from_numbers + bytes_K[None, :], mask=is_read, other=0)
        if per_byte == 2:
            codes = tl.interleave(codes & 15, codes >> 4)
        weights = _values(codes, kind)
        groups_B = first // columns + tl.arange(0, num_groups)
        is_read = is_output[:, None] & (groups_B < num_scales)[None, :]
        places = rows_N[:, None] * num_scales + groups_B[None, :]
        factors = tl.load(scales + places, mask=is_read, other=0)
        if has_powers:
            # Exponents, of which 0 is below those of normal numbers.
            factors = tl.maximum(factors.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
        if zeros is not None:
            zero = tl.load(zeros + places, mask=is_read, other=0).to(tl.float32)
            weights -= _spread(zero, block_outputs, block_inputs, num_groups)
        weights *= _spread(factors, block_outputs, block_inputs, num_groups)
        weights = _rounded(weights, dtype).to(dtype)
        sums = _dot(weights, x_KS, sums)
    to_output = output + tokens_S.to(tl.int64)[None, :] * num_outputs + outputs_N[:, None]
    tl.store(to_output, _rounded(sums, dtype), mask=is_output[:, None] & (tokens_S < end)[None, :])


@torch.library.custom_op("specdist::grouped_packed_product", mutates_args=())
def grouped_packed_product(
    inputs_SK: Tensor, ends_E: Tensor, numbers: Tensor, scales_EAB: Tensor, zeros_EAB: Tensor | None, *,
    kind: str, rows: int, columns: int | None, num_outputs: int,
) -> Tensor:  # fmt: skip
    """[S, N] in the inputs' dtype; zeros for tokens of no expert.

    Args:
        ends_E: int32, where the tokens of an expert end.
        numbers: [E, N, K] of 8 bits, or [E, N, K / 2] bytes of two numbers.
        scales_EAB: float32, or the exponents of powers of two; each belongs to ``rows`` × ``columns``, a
            power of two, or None for all.
        kind: of numbers, see :data:`specdist.models.quantized.quantized_weights.Numbers`.
    """
    num_tokens, num_inputs = inputs_SK.shape
    num_experts = len(ends_E)
    are_many = num_tokens >= MANY_TOKENS * num_experts and inputs_SK.element_size() == 2
    block_tokens = MANY_TOKENS if are_many else FEW_TOKENS
    output = inputs_SK.new_zeros(num_tokens, num_outputs)
    if num_tokens:
        # Every expert may leave one block incomplete.
        num_blocks = num_tokens // block_tokens + min(num_experts, num_tokens)
        grid = (triton.cdiv(num_outputs, BLOCK_OUTPUTS), num_blocks)
        grouped_product_kernel[grid](
            inputs_SK.contiguous(), numbers.view(torch.uint8), scales_EAB, zeros_EAB, ends_E, output,
            kind=kind, rows=rows, columns=columns or triton.next_power_of_2(max(num_inputs, BLOCK_INPUTS)),
            has_powers=scales_EAB.dtype == torch.uint8, num_experts=num_experts, num_outputs=num_outputs,
            num_inputs=num_inputs, block_experts=triton.next_power_of_2(num_experts),
            block_tokens=block_tokens, block_outputs=BLOCK_OUTPUTS, block_inputs=BLOCK_INPUTS, **OPTIONS,
        )  # fmt: skip
    return output


@triton.jit
def _ranked(scores, ids):
    """int64 in the order of float32 scores, and of equal ones from the lowest id on."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # of -0, too
    return (bits ^ ((bits >> 31) & LAST)).to(tl.int64) << 32 | (LAST - ids)


@triton.jit
def route_kernel(
    logits, correction, chosen, weights, share, rest, is_sigmoid: tl.constexpr, num_experts: tl.constexpr,
    num_chosen: tl.constexpr, num_groups: tl.constexpr, num_kept: tl.constexpr, block_groups: tl.constexpr,
    block_size: tl.constexpr, block_chosen: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,)."""
    token, places_E = tl.program_id(0).to(tl.int64), tl.arange(0, block_groups * block_size)
    size: tl.constexpr = num_experts // num_groups
    groups_G, ids_E = tl.arange(0, block_groups), places_E // block_size * size + places_E % block_size
    is_used_E = (places_E // block_size < num_groups) & (places_E % block_size < size)
    logits_E = tl.load(logits + token * num_experts + ids_E, mask=is_used_E, other=-float("inf"))
    scores_E = logits_E.to(tl.float32)
    if is_sigmoid:
        scores_E = 1.0 / (1.0 + tl.exp(-scores_E))
    else:
        scores_E = tl.exp(scores_E - tl.max(scores_E, 0))
        scores_E /= tl.sum(scores_E, 0)
    # Logits have the order of the scores, and fewer of them are equal.
    choice_E = scores_E if num_kept < num_groups else logits_E.to(tl.float32)
    if correction is not None:
        choice_E = scores_E + tl.load(correction + ids_E, mask=is_used_E, other=0.0).to(tl.float32)
    choice_E = tl.where(choice_E != choice_E, float("inf"), choice_E)
    ranked_E = tl.where(is_used_E, _ranked(choice_E, ids_E), LEAST)
    if num_kept < num_groups:
        ranked_GE = tl.reshape(ranked_E, (block_groups, block_size))
        choice_GE = tl.reshape(tl.where(is_used_E, choice_E, -float("inf")), (block_groups, block_size))
        is_second_GE = ranked_GE < tl.max(ranked_GE, 1)[:, None]
        sums_G = tl.max(choice_GE, 1) + tl.max(tl.where(is_second_GE, choice_GE, -float("inf")), 1)
        ranked_G = tl.where(groups_G < num_groups, _ranked(sums_G, groups_G), LEAST)
        last = tl.max(ranked_G, 0)
        for _ in range(1, num_kept):
            last = tl.max(tl.where(ranked_G < last, ranked_G, LEAST), 0)
        ranked_GE = tl.where((ranked_G >= last)[:, None], ranked_GE, LEAST)
        ranked_E = tl.reshape(ranked_GE, (block_groups * block_size,))
    places_C, ids_C = tl.arange(0, block_chosen), tl.zeros((block_chosen,), tl.int64)
    weights_C, best = tl.zeros((block_chosen,), tl.float32), tl.max(ranked_E, 0)
    for place in range(num_chosen):
        ids_C = tl.where(places_C == place, LAST - (best & LAST), ids_C)
        weight = tl.sum(tl.where(ranked_E == best, scores_E, 0.0), 0)
        weights_C = tl.where(places_C == place, weight, weights_C)
        best = tl.max(tl.where(ranked_E < best, ranked_E, LEAST), 0)
    weights_C = weights_C / (share * tl.sum(weights_C, 0) + rest)
    is_used_C, places_C = places_C < num_chosen, token * num_chosen + places_C
    tl.store(chosen + places_C, ids_C, mask=is_used_C)
    tl.store(weights + places_C, _rounded(weights_C, weights.dtype.element_ty), mask=is_used_C)


@torch.library.custom_op("specdist::route", mutates_args=())
def route(
    logits_TE: Tensor, correction_E: Tensor | None, *, dtype: torch.dtype, is_sigmoid: bool, num_chosen: int,
    num_groups: int, num_kept: int, share: float, rest: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights of each token's experts and int64 ids, [T, C] both: the largest scores, and of equal ones the
    lowest ids. Scores are the softmax or the sigmoid of the logits; NaN is the largest.

    Args:
        correction_E: added to the scores for the choice alone.
        num_kept: of ``num_groups`` groups, those with the largest sums of their two best scores.
        share, rest: a weight is score / (share × sum of the chosen scores + rest).
    """
    num_tokens, num_experts = logits_TE.shape
    chosen_TC = logits_TE.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    weights_TC = torch.empty_like(chosen_TC, dtype=dtype)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits_TE.contiguous(), correction_E, chosen_TC, weights_TC, share, rest,
            is_sigmoid=is_sigmoid, num_experts=num_experts, num_chosen=num_chosen, num_groups=num_groups,
            num_kept=num_kept, block_groups=triton.next_power_of_2(num_groups),
            block_size=triton.next_power_of_2(num_experts // num_groups),
            block_chosen=triton.next_power_of_2(num_chosen), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return weights_TC, chosen_TC


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    hidden, ids, rows, ends, places, sorted_ids, num_pairs, num_experts: tl.constexpr,
    num_chosen: tl.constexpr, width: tl.constexpr, block_pairs: tl.constexpr, block_width: tl.constexpr,
    block_others: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pairs and of experts, blocks of a row). A pair's place is how many are before it."""
    pairs_S = tl.program_id(0) * block_pairs + tl.arange(0, block_pairs)
    is_pair_S = pairs_S < num_pairs
    ids_S = tl.load(ids + pairs_S, mask=is_pair_S, other=0).to(tl.int32)
    keys_S = ids_S * num_pairs + pairs_S
    places_S, ends_E = tl.zeros((block_pairs,), tl.int32), tl.zeros((block_pairs,), tl.int32)
    for first in range(0, num_pairs, block_others):
        others_O = first + tl.arange(0, block_others)
        ids_O = tl.load(ids + others_O, mask=others_O < num_pairs, other=0).to(tl.int32)
        keys_O = tl.where(others_O < num_pairs, ids_O * num_pairs + others_O, LAST)
        places_S += tl.sum((keys_O[None, :] < keys_S[:, None]).to(tl.int32), 1)
        ends_E += tl.sum((keys_O[None, :] < ((pairs_S + 1) * num_pairs)[:, None]).to(tl.int32), 1)
    columns_H = tl.program_id(1) * block_width + tl.arange(0, block_width)
    is_used_SH = is_pair_S[:, None] & (columns_H < width)[None, :]
    tokens_S, to_S = (pairs_S // num_chosen).to(tl.int64), places_S.to(tl.int64)
    rows_SH = tl.load(hidden + tokens_S[:, None] * width + columns_H[None, :], mask=is_used_SH)
    tl.store(rows + to_S[:, None] * width + columns_H[None, :], rows_SH, mask=is_used_SH)
    if tl.program_id(1) == 0:
        tl.store(ends + pairs_S, ends_E, mask=pairs_S < num_experts)
        tl.store(places + pairs_S, to_S, mask=is_pair_S)
        tl.store(sorted_ids + to_S, tl.minimum(ids_S, num_experts - 1).to(tl.int64), mask=is_pair_S)


@torch.library.custom_op("specdist::sort_pairs", mutates_args=())
def sort_pairs(hidden_TH: Tensor, ids_TC: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`specdist.models.loading.packed_experts.plain_sort`."""
    num_pairs, width = ids_TC.numel(), hidden_TH.shape[1]
    rows_SH, ends_E = hidden_TH.new_empty(num_pairs, width), ids_TC.new_empty(num_experts, dtype=torch.int32)
    places_S, ids_S = ids_TC.new_empty(num_pairs), ids_TC.new_empty(num_pairs)
    sort_kernel[(triton.cdiv(max(num_pairs, num_experts), BLOCK_PAIRS), triton.cdiv(width, BLOCK_WIDTH))](
        hidden_TH.contiguous(), ids_TC.contiguous(), rows_SH, ends_E, places_S, ids_S, num_pairs,
        num_experts=num_experts, num_chosen=ids_TC.shape[1], width=width, block_pairs=BLOCK_PAIRS,
        block_width=BLOCK_WIDTH, block_others=BLOCK_OTHERS, num_warps=4,
    )  # fmt: skip
    return rows_SH, ends_E, places_S, ids_S


@triton.jit
def sum_kernel(
    rows, places, ids, weights, biases, output, num_experts: tl.constexpr, num_chosen: tl.constexpr,
    width: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of a row). One expert after the other."""
    token = tl.program_id(0).to(tl.int64)
    columns_H = tl.program_id(1) * block_width + tl.arange(0, block_width)
    of_rows: tl.constexpr = rows.dtype.element_ty
    of_weighted: tl.constexpr = of_rows if weights.dtype.element_ty == of_rows else tl.float32
    sums_H = tl.zeros((block_width,), tl.float32)
    for pair in range(token * num_chosen, (token + 1) * num_chosen):
        expert, place = tl.load(ids + pair), tl.load(places + pair)
        is_own_H = (columns_H < width) & (expert < num_experts)
        row_H = tl.load(rows + place * width + columns_H, mask=is_own_H, other=0.0).to(tl.float32)
        if biases is not None:
            bias_H = tl.load(biases + expert * width + columns_H, mask=is_own_H, other=0.0)
            row_H = _rounded(row_H + bias_H.to(tl.float32), of_rows)
        sums_H += _rounded(row_H * tl.load(weights + pair).to(tl.float32), of_weighted)
    tl.store(output + token * width + columns_H, _rounded(sums_H, of_rows), mask=columns_H < width)


@torch.library.custom_op("specdist::sum_pairs", mutates_args=())
def sum_pairs(
    rows_SH: Tensor, places_S: Tensor, ids_TC: Tensor, weights_TC: Tensor, biases_EH: Tensor | None,
    num_experts: int | None,
) -> Tensor:  # fmt: skip
    """As :func:`specdist.models.loading.packed_experts.plain_sum`."""
    (num_tokens, num_chosen), width = ids_TC.shape, rows_SH.shape[1]
    output_TH = rows_SH.new_empty(num_tokens, width)
    if num_tokens:
        sum_kernel[(num_tokens, triton.cdiv(width, BLOCK_WIDTH))](
            rows_SH.contiguous(), places_S, ids_TC.contiguous(), weights_TC.contiguous(), biases_EH,
            output_TH, num_experts=num_experts or LAST.value, num_chosen=num_chosen, width=width,
            block_width=BLOCK_WIDTH, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return output_TH
