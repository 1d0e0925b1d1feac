"""Recurrent layers on short blocks of tokens: Mamba 1 and 2, and the gated delta rule, one kernel each.

A program has a part of one state in registers: it reads it once from its slot, takes the block's tokens one
after the other, and writes back the state after the token where it is kept, which is before the last ones
where these may still be rolled back. So a pass moves a state twice, whatever the number of its tokens; plain
operations copy states out of their slots and back, and every product of a chunk moves them. Sums are those of
one token after the other: a sequence's numbers depend neither on its neighbours nor on how its tokens are cut
into blocks.

All sequences' tokens are in one line, with others between them that nobody runs. Which are whose, and where a
state is kept, the kernels read on the device (:class:`specdist.models.recurrent.states.Runs`), so that one
launch is right for blocks of any lengths.

T places of tokens, H heads of P numbers in G groups, N numbers of a state beside them, K width of keys and V
of values, D decays of a head: one, or one for each of its keys' numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a state in one program: 32 of a thread's registers.
BLOCK = 4096
OPTIONS = {"num_warps": 4}


@triton.jit
def _run(runs):
    """The numbers of this program's sequence."""
    stride, own = tl.num_programs(0), runs + tl.program_id(0)
    slot, is_first, first = tl.load(own), tl.load(own + stride), tl.load(own + 2 * stride)
    return slot, is_first, first, tl.load(own + 3 * stride), tl.load(own + 4 * stride)


@triton.jit(do_not_specialize=["num_heads", "num_groups"])
def mamba_kernel(
    output, states, runs, x, steps, b, c, rates, num_heads, num_groups, stride_x, stride_b, stride_c,
    width: tl.constexpr, state_size: tl.constexpr, has_rate_of_number: tl.constexpr,
    block_width: tl.constexpr, block_state: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads, blocks of a head). Strides are those of tokens. ``has_rate_of_number``: as in
    Mamba 1, where the numbers of the one head have time steps, and those of a state rates, of their own."""
    head = tl.program_id(1)
    slot, is_first, first, end, border = _run(runs)
    rows_P = tl.program_id(2) * block_width + tl.arange(0, block_width)
    columns_N = tl.arange(0, block_state)
    is_row, is_column = rows_P < width, columns_N < state_size
    is_used = is_row[:, None] & is_column[None, :]
    own = rows_P[:, None] * state_size + columns_N[None, :]
    places = states + (slot * num_heads + head) * width * state_size + own
    numbers = tl.load(places, mask=is_used & (is_first == 0), other=0.0)
    rate = tl.load(rates + own, mask=is_used, other=0.0) if has_rate_of_number else tl.load(rates + head)
    group = head // (num_heads // num_groups)
    for token in range(first, end):
        if token == border:
            tl.store(places, numbers, mask=is_used)
        of_x = tl.load(x + token * stride_x + head * width + rows_P, mask=is_row, other=0.0).to(tl.float32)
        of_b = tl.load(b + token * stride_b + group * state_size + columns_N, mask=is_column, other=0.0)
        of_c = tl.load(c + token * stride_c + group * state_size + columns_N, mask=is_column, other=0.0)
        if has_rate_of_number:
            step = tl.load(steps + token * width + rows_P, mask=is_row, other=0.0)
            decay = tl.exp(step[:, None] * rate)
        else:
            step = tl.load(steps + token * num_heads + head)
            decay = tl.exp(step * rate)
        numbers = numbers * decay + (step * of_x)[:, None] * of_b.to(tl.float32)[None, :]
        read = tl.sum(numbers * of_c.to(tl.float32)[None, :], 1)
        tl.store(output + (token * num_heads + head) * width + rows_P, read, mask=is_row)
    if border == end:
        tl.store(places, numbers, mask=is_used)


@triton.jit(do_not_specialize=["num_heads"])
def delta_rule_kernel(
    output, states, runs, queries, keys, values, log_decays, rates, num_heads,
    key_width: tl.constexpr, value_width: tl.constexpr, has_decay_of_number: tl.constexpr,
    block_keys: tl.constexpr, block_values: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads, blocks of values). ``has_decay_of_number``: of a key's numbers one each."""
    head = tl.program_id(1)
    slot, is_first, first, end, border = _run(runs)
    rows_K = tl.arange(0, block_keys)
    columns_V = tl.program_id(2) * block_values + tl.arange(0, block_values)
    is_row, is_column = rows_K < key_width, columns_V < value_width
    is_used = is_row[:, None] & is_column[None, :]
    own = slot * num_heads + head
    places = states + (own * key_width + rows_K[:, None]) * value_width + columns_V[None, :]
    numbers = tl.load(places, mask=is_used & (is_first == 0), other=0.0)
    for place in range(first, end):
        if place == border:
            tl.store(places, numbers, mask=is_used)
        token = place * num_heads + head
        query = tl.load(queries + token * key_width + rows_K, mask=is_row, other=0.0)
        key = tl.load(keys + token * key_width + rows_K, mask=is_row, other=0.0)
        value = tl.load(values + token * value_width + columns_V, mask=is_column, other=0.0)
        if has_decay_of_number:
            log = tl.load(log_decays + token * key_width + rows_K, mask=is_row, other=0.0)
            numbers = numbers * tl.exp(log)[:, None]
        else:
            numbers = numbers * tl.exp(tl.load(log_decays + token))
        correction = tl.load(rates + token) * (value - tl.sum(numbers * key[:, None], 0))
        numbers += key[:, None] * correction[None, :]
        read = tl.sum(numbers * query[:, None], 0)
        tl.store(output + token * value_width + columns_V, read, mask=is_column)
    if border == end:
        tl.store(places, numbers, mask=is_used)


@torch.library.custom_op("specdist::mamba", mutates_args=("output", "states"))
def mamba(
    output: Tensor,
    states: Tensor,
    runs_5S: Tensor,
    x_THP: Tensor,
    steps: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    rates: Tensor,
) -> None:
    """Write the outputs of the places that are run.

    Args:
        output: float32 [T, H, P]; states: float32 [slots, H, P, N], contiguous both.
        runs_5S: int64, contiguous, as of :class:`specdist.models.recurrent.states.Runs`.
        steps: float32 time steps of heads, [T, H]; of Mamba 1 of all numbers, [T, P], and H = G = 1.
        rates: float32 [H]; of Mamba 1 [P, N].
    """
    _, num_heads, width = x_THP.shape
    num_groups, state_size = b_TGN.shape[1:]
    x_THP, b_TGN, c_TGN = (_rows(each) for each in (x_THP, b_TGN, c_TGN))
    constants = mamba_constants(width, state_size)
    mamba_kernel[(runs_5S.shape[1], num_heads, triton.cdiv(width, constants["block_width"]))](
        output,
        states,
        runs_5S,
        x_THP,
        steps.contiguous(),
        b_TGN,
        c_TGN,
        rates.contiguous(),
        num_heads,
        num_groups,
        *(each.stride(0) for each in (x_THP, b_TGN, c_TGN)),
        width=width,
        state_size=state_size,
        has_rate_of_number=rates.dim() == 2,
        **constants,
        **OPTIONS,
    )


def _rows(tokens: Tensor) -> Tensor:
    """[T, A, B], of which a token's numbers lie side by side."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


def mamba_constants(width: int, state_size: int) -> dict[str, int]:
    block_state = triton.next_power_of_2(state_size)
    block_width = min(triton.next_power_of_2(width), max(1, BLOCK // block_state))
    return {"block_width": block_width, "block_state": block_state}


@torch.library.custom_op("specdist::delta_rule", mutates_args=("output", "states"))
def delta_rule(
    output: Tensor,
    states: Tensor,
    runs_5S: Tensor,
    queries_THK: Tensor,
    keys_THK: Tensor,
    values_THV: Tensor,
    log_decays_THD: Tensor,
    rates_TH: Tensor,
) -> None:
    """Write the outputs of the places that are run. All but the runs are float32, the outputs [T, H, V] and
    the states [slots, H, K, V]; the rest is as of :func:`mamba`."""
    _, num_heads, key_width = keys_THK.shape
    value_width, num_decays = values_THV.shape[2], log_decays_THD.shape[2]
    constants = delta_rule_constants(key_width, value_width)
    tokens = (queries_THK, keys_THK, values_THV, log_decays_THD, rates_TH)
    delta_rule_kernel[(runs_5S.shape[1], num_heads, triton.cdiv(value_width, constants["block_values"]))](
        output,
        states,
        runs_5S,
        *(each.contiguous() for each in tokens),
        num_heads,
        key_width=key_width,
        value_width=value_width,
        has_decay_of_number=num_decays > 1,
        **constants,
        **OPTIONS,
    )


def delta_rule_constants(key_width: int, value_width: int) -> dict[str, int]:
    block_keys = triton.next_power_of_2(key_width)
    block_values = min(triton.next_power_of_2(value_width), max(1, BLOCK // block_keys))
    return {"block_keys": block_keys, "block_values": block_values}
