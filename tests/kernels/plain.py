"""Plain implementations of the project's kernels, by the operators' names: they share no code with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from specdist.models.attention.attention import AttentionCall, AttentionRules
from specdist.models.attention.probe import plain_attention
from specdist.models.batch.flat import PagedSegments
from specdist.models.cache.key_value import plain_write
from specdist.models.quantized.input_rounding import input_scales, rounded_inputs
from specdist.models.quantized.quantized_weights import LayerFormat, Numbers, QuantizedWeight
from specdist.models.recurrent.gated_delta import DeltaTokens, gated_delta_rule
from specdist.models.recurrent.mamba import Mamba2Tokens, run_mamba1, run_mamba2
from specdist.models.recurrent.runs import Padded, Runs, padded_of, recur
from specdist.sampling.coupling import waiting_times_of
from specdist.sampling.distributions import Dense, OneHot
from specdist.sampling.processing.row_filters import plain_probabilities


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
    del max_split_bytes
    assert int(query_starts_S1.diff().max()) <= max_queries, (
        "a segment has more queries than max_queries says"
    )
    assert int(used_S.max()) <= max_keys, "a segment has more keys than max_keys says"
    segments = PagedSegments(block_table_SP, used_S, query_starts_S1, len(queries_THD), max_keys)
    rules = AttentionRules(scale, window, softcap, sinks_H is not None, is_latent, hides_first, is_causal)
    scales = None if key_scales is None or value_scales is None else (key_scales, value_scales)
    call = AttentionCall(queries_THD, key_pages, value_pages, rules, sinks_H, scales)
    return plain_attention(call, segments).to(queries_THD.dtype)


def draw(probabilities_NV: Tensor, uniforms_N: Tensor, *, not_finite: int) -> Tensor:
    del not_finite
    return Dense(probabilities_NV).draw(uniforms_N)


def race(probabilities_NV: Tensor, words_N: Tensor, *, not_finite: int, first_id: int = 0) -> Tensor:
    del not_finite
    waiting_NV = waiting_times_of(words_N, range(first_id, first_id + probabilities_NV.shape[1]))
    return OneHot.of_largest(torch.log(probabilities_NV / waiting_NV)).token_ids_N


def rms_norm(
    inputs: Tensor, weight_W: Tensor, *, epsilon: float, weight_offset: float, rounds_first: bool
) -> Tensor:
    numbers = inputs.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + epsilon)
    numbers = numbers.to(inputs.dtype).float() if rounds_first else numbers
    weight_W = weight_offset + weight_W.float() if weight_offset else weight_W.float()
    return (weight_W * numbers).to(inputs.dtype)


def residual_norm(
    inputs: Tensor, residual: Tensor, weight_before_W: Tensor | None, weight_W: Tensor, **form: Any
) -> tuple[Tensor, Tensor]:
    if weight_before_W is not None:
        inputs = rms_norm(inputs, weight_before_W, **form)
    sums = residual + inputs
    return sums, rms_norm(sums, weight_W, **form)


def rotary(queries_THD: Tensor, keys_TGD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    queries, keys = (
        tensor * cos_TD[:, None] + rotate_half(tensor) * sin_TD[:, None] for tensor in (queries_THD, keys_TGD)
    )
    return queries, keys


def write_rotated(
    key_pages: Tensor, value_pages: Tensor, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor,
    queries_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *scales: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, keys = rotary(queries_THD, keys_TGD, cos_TD, sin_TD)
    plain_write(key_pages, value_pages, cache_index_T, keys, values_TGD, *scales)
    return queries, keys


def gated_activation(gates: Tensor, ups: Tensor, *, is_tanh: bool) -> Tensor:
    return (F.gelu(gates, approximate="tanh") if is_tanh else F.silu(gates)) * ups


def grouped_packed_product(
    inputs_SK: Tensor,
    ends_E: Tensor,
    numbers: Tensor,
    scales_EAB: Tensor,
    zeros_EAB: Tensor | None,
    *,
    kind: Numbers,
    rows: int,
    columns: int | None,
    num_outputs: int,
) -> Tensor:
    form = LayerFormat(numbers=kind, rows=rows, columns=columns, has_powers=scales_EAB.dtype == torch.uint8)
    output = inputs_SK.new_zeros(len(inputs_SK), num_outputs)
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
        own = slice(begin, end)
        if begin < end:
            zeros_AB = None if zeros_EAB is None else zeros_EAB[expert]
            weight = QuantizedWeight(
                form, inputs_SK.shape[1], numbers[expert], scales_EAB[expert], zeros_AB
            ).dequantized(inputs_SK.dtype)
            output[own] = F.linear(inputs_SK[own], weight)
    return output


def route(
    logits_TE: Tensor, correction_E: Tensor | None, *, dtype: torch.dtype, is_sigmoid: bool, num_chosen: int,
    num_groups: int, num_kept: int, share: float, rest: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if num_groups > 1:
        choice_TGE = choice_TE.unflatten(1, (num_groups, -1))
        kept = choice_TGE.topk(2).values.sum(-1).topk(num_kept).indices
        is_left = torch.ones_like(choice_TGE[..., 0], dtype=torch.bool).scatter(1, kept, 0)
        choice_TE = choice_TGE.masked_fill(is_left[..., None], -torch.inf).flatten(1)
    ids_TC = choice_TE.topk(num_chosen).indices
    weights_TC = scores_TE.gather(1, ids_TC)
    return (weights_TC / (share * weights_TC.sum(-1, keepdim=True) + rest)).to(dtype), ids_TC


def sort_pairs(hidden_TH: Tensor, ids_TC: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    ids = ids_TC.flatten().tolist()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    ends = torch.tensor([sum(each <= expert for each in ids) for expert in range(num_experts)])
    numbers = [*map(order.index, range(len(ids)))], [min(ids[pair], num_experts - 1) for pair in order]
    rows_SH = torch.stack([hidden_TH[pair // ids_TC.shape[1]] for pair in order])
    return rows_SH, *(each.to(ids_TC.device) for each in (ends.int(), *map(torch.tensor, numbers)))


def sum_pairs(
    rows_SH: Tensor, places_S: Tensor, ids_TC: Tensor, weights_TC: Tensor, biases_EH: Tensor | None,
    num_experts: int | None,
) -> Tensor:  # fmt: skip
    sums_TH = rows_SH.new_zeros(len(ids_TC), rows_SH.shape[1], dtype=torch.float64)
    for pair, (place, expert) in enumerate(zip(places_S.tolist(), ids_TC.flatten().tolist(), strict=True)):
        if num_experts is None or expert < num_experts:
            row_H = rows_SH[place].double() + (0.0 if biases_EH is None else biases_EH[expert].double())
            sums_TH[pair // ids_TC.shape[1]] += weights_TC.flatten()[pair].double() * row_H
    return sums_TH.to(rows_SH.dtype)


def few_tokens_product(
    inputs_TK: Tensor, numbers_NK: Tensor, bias_N: Tensor | None, arrivals: Tensor,
    scales_AB: Tensor | None = None, input_scales: Tensor | None = None, *after: Any, dtype: torch.dtype,
    rows: int | None = None, columns: int | None = None, gate: int = 0, **form: Any,
) -> Tensor:  # fmt: skip
    assert not arrivals.any()
    inputs, weight = inputs_TK.double(), numbers_NK.double()
    (num_outputs, num_inputs), width = weight.shape, columns or weight.shape[1]
    if scales_AB is not None:
        wide = scales_AB.repeat_interleave(rows or num_outputs, 0).repeat_interleave(width, 1)
        weight *= wide[:num_outputs, :num_inputs]
    if input_scales is not None:
        inputs *= input_scales.repeat_interleave(width, 1)[:, :num_inputs]
    outputs = inputs @ weight.T
    outputs = (outputs if bias_N is None else outputs + bias_N).to(dtype)
    if after:
        form = {"epsilon": 0.0, "weight_offset": 0.0, "rounds_first": False, **form}
        return torch.stack(residual_norm(outputs, *after, **form))
    return gated_activation(*outputs.chunk(2, 1), is_tanh=gate == 2) if gate else outputs


def mamba(output: Tensor, held: Tensor, numbers_5S: Tensor, *parts: Tensor) -> None:
    *tokens, rates = parts
    run, line = run_mamba1 if rates.dim() == 2 else run_mamba2, Mamba2Tokens(*tokens)

    def plain(state: Tensor, padded: Padded) -> tuple[Tensor, Tensor]:
        return run(state, line.at(padded), rates, padded.borders_S)

    _recur(output, held, numbers_5S, plain)


def delta_rule(output: Tensor, held: Tensor, numbers_5S: Tensor, *line: Tensor) -> None:
    def plain(state: Tensor, padded: Padded) -> tuple[Tensor, Tensor]:
        tokens = DeltaTokens.of(padded, *line)
        found, after = gated_delta_rule(tokens, state, padded.borders, padded.borders_S)
        return found.transpose(1, 2), after

    _recur(output, held, numbers_5S, plain)


def _recur(
    output: Tensor,
    held: Tensor,
    numbers_5S: Tensor,
    plain: Callable[[Tensor, Padded], tuple[Tensor, Tensor]],
) -> None:
    """Where a run has no border its outputs are written alone; where it has no tokens nothing is."""
    has_tokens_S, leaves_S = numbers_5S[3] > numbers_5S[2], numbers_5S[4] >= 0
    for is_own_S, own_held in ((has_tokens_S & leaves_S, held), (has_tokens_S & ~leaves_S, held.clone())):
        if is_own_S.any():
            own_5S = numbers_5S[:, is_own_S]
            own_5S[4] = own_5S[4].maximum(own_5S[2])
            recur(output, own_held, [Runs(own_5S, padded_of(own_5S.cpu().numpy(), held.device))], None, plain)


def rounded_rows(
    inputs_MW: Tensor, *, limit: float, is_float8: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    form = LayerFormat(numbers="float8" if is_float8 else "int8", rows=1, columns=None, activations="token")
    scales = input_scales(form, inputs_MW)
    assert scales is not None
    scales = scales if scale is None else torch.full_like(scales, scale)
    return rounded_inputs(form, inputs_MW, scales), scales


ON_HOST: dict[str, Callable[..., Any]] = {
    "paged_attention": paged_attention,
    "processed_probabilities": plain_probabilities,
    "draw": draw,
    "race": race,
    "rms_norm": rms_norm,
    "residual_norm": residual_norm,
    "rotary": rotary,
    "gated_activation": gated_activation,
    "rounded_rows": rounded_rows,
    "write_tokens": plain_write,
    "write_rotated": write_rotated,
    "grouped_packed_product": grouped_packed_product,
    "route": route,
    "sort_pairs": sort_pairs,
    "sum_pairs": sum_pairs,
    "few_tokens_product": few_tokens_product,
    "mamba": mamba,
    "delta_rule": delta_rule,
}
