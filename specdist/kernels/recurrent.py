"""Recurrent layers on short blocks of tokens: Mamba 1 and 2, and the gated delta rule, one kernel each.

A program has a part of one state in registers: it reads it once from its slot, takes the block's tokens one
after the other, and writes back the state after the token where it is kept, which is before the last ones
where these may still be rolled back. So a pass moves a state twice, whatever the number of its tokens; plain
operations copy states out of their slots and back, and every product of a chunk moves them. Sums are those of
one token after the other: a sequence's numbers depend neither on its neighbours nor on how its tokens are cut
into blocks.

S sequences, L tokens of each, H heads of P numbers in G groups, N numbers of a state beside them, K width of
keys and V of values, D decays of a head: one, or one for each of its keys' numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a state in one program: 32 of a thread's registers.
BLOCK = 4096
OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "num_groups"])
def mamba_kernel(
    states, slots, is_first, x, steps, b, c, rates, borders, output, num_tokens, num_heads, num_groups,
    stride_x, stride_b, stride_c, width: tl.constexpr, state_size: tl.constexpr,
    has_rate_of_number: tl.constexpr, block_width: tl.constexpr, block_state: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads, blocks of a head). Strides are those of tokens. ``has_rate_of_number``: as in
    Mamba 1, where the numbers of the one head have time steps, and those of a state rates, of their own."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows_P = tl.program_id(2) * block_width + tl.arange(0, block_width)
    columns_N = tl.arange(0, block_state)
    is_row, is_column = rows_P < width, columns_N < state_size
    is_used = is_row[:, None] & is_column[None, :]
    own = rows_P[:, None] * state_size + columns_N[None, :]
    slot = tl.load(slots + sequence).to(tl.int64)
    places = states + (slot * num_heads + head) * width * state_size + own
    numbers = tl.load(places, mask=is_used & (tl.load(is_first + sequence) == 0), other=0.0)
    rate = tl.load(rates + own, mask=is_used, other=0.0) if has_rate_of_number else tl.load(rates + head)
    group = head // (num_heads // num_groups)
    border = tl.load(borders + sequence)
    for index in range(num_tokens):
        if index == border:
            tl.store(places, numbers, mask=is_used)
        token = sequence * num_tokens + index
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
    if border == num_tokens:
        tl.store(places, numbers, mask=is_used)


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def delta_rule_kernel(
    states, slots, is_first, queries, keys, values, log_decays, rates, borders, output, num_tokens, num_heads,
    key_width: tl.constexpr, value_width: tl.constexpr, has_decay_of_number: tl.constexpr,
    block_keys: tl.constexpr, block_values: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads, blocks of values). ``has_decay_of_number``: of a key's numbers one each."""
    head = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    rows_K = tl.arange(0, block_keys)
    columns_V = tl.program_id(2) * block_values + tl.arange(0, block_values)
    is_row, is_column = rows_K < key_width, columns_V < value_width
    is_used = is_row[:, None] & is_column[None, :]
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64) * num_heads + tl.program_id(1)
    places = states + (slot * key_width + rows_K[:, None]) * value_width + columns_V[None, :]
    numbers = tl.load(places, mask=is_used & (tl.load(is_first + sequence) == 0), other=0.0)
    border = tl.load(borders + sequence)
    for index in range(num_tokens):
        if index == border:
            tl.store(places, numbers, mask=is_used)
        token = head * num_tokens + index
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
    if border == num_tokens:
        tl.store(places, numbers, mask=is_used)


@torch.library.custom_op("specdist::mamba", mutates_args=("states",))
def mamba(
    states: Tensor,
    slots_S: Tensor,
    is_first_S: Tensor,
    x_SLHP: Tensor,
    steps: Tensor,
    b_SLGN: Tensor,
    c_SLGN: Tensor,
    rates: Tensor,
    borders_S: Tensor,
) -> Tensor:
    """Outputs, float32 [S, L, H, P]; each slot then has the state after ``borders`` of its tokens.

    Args:
        states: float32 [slots, H, P, N], contiguous.
        is_first_S: bool, of sequences that have no state yet, whatever their slots hold.
        steps: float32 time steps of heads, [S, L, H]; of Mamba 1 of all numbers, [S, L, P], and H = G = 1.
        rates: float32 [H]; of Mamba 1 [P, N].
        slots_S, borders_S: int64.
    """
    num_sequences, num_tokens, num_heads, width = x_SLHP.shape
    num_groups, state_size = b_SLGN.shape[2:]
    x_SLHP, b_SLGN, c_SLGN = (_rows(each) for each in (x_SLHP, b_SLGN, c_SLGN))
    output = torch.empty(x_SLHP.shape, dtype=torch.float32, device=x_SLHP.device)
    constants = mamba_constants(width, state_size)
    mamba_kernel[(num_sequences, num_heads, triton.cdiv(width, constants["block_width"]))](
        states,
        slots_S,
        is_first_S,
        x_SLHP,
        steps.contiguous(),
        b_SLGN,
        c_SLGN,
        rates.contiguous(),
        borders_S,
        output,
        num_tokens,
        num_heads,
        num_groups,
        *(each.stride(1) for each in (x_SLHP, b_SLGN, c_SLGN)),
        width=width,
        state_size=state_size,
        has_rate_of_number=rates.dim() == 2,
        **constants,
        **OPTIONS,
    )
    return output


def _rows(tokens: Tensor) -> Tensor:
    """[S, L, A, B], of which a token's numbers lie side by side, and tokens at equal distances."""
    stride = tokens.stride(1)
    is_so = tokens.stride()[2:] == (tokens.shape[3], 1) and tokens.stride(0) == stride * tokens.shape[1]
    return tokens if is_so else tokens.contiguous()


def mamba_constants(width: int, state_size: int) -> dict[str, int]:
    block_state = triton.next_power_of_2(state_size)
    block_width = min(triton.next_power_of_2(width), max(1, BLOCK // block_state))
    return {"block_width": block_width, "block_state": block_state}


@torch.library.custom_op("specdist::delta_rule", mutates_args=("states",))
def delta_rule(
    states: Tensor,
    slots_S: Tensor,
    is_first_S: Tensor,
    queries_SHLK: Tensor,
    keys_SHLK: Tensor,
    values_SHLV: Tensor,
    log_decays_SHLD: Tensor,
    rates: Tensor,
    borders_S: Tensor,
) -> Tensor:
    """Outputs [S, H, L, V]; each slot then has the state after ``borders`` of its tokens. All are float32,
    the states [slots, H, K, V] and the rates [S, H, L, 1]; the rest is as of :func:`mamba`."""
    num_sequences, num_heads, num_tokens, key_width = keys_SHLK.shape
    output = torch.empty(values_SHLV.shape, dtype=torch.float32, device=values_SHLV.device)
    value_width, num_decays = values_SHLV.shape[3], log_decays_SHLD.shape[3]
    constants = delta_rule_constants(key_width, value_width)
    tokens = (queries_SHLK, keys_SHLK, values_SHLV, log_decays_SHLD, rates)
    delta_rule_kernel[(num_sequences, num_heads, triton.cdiv(value_width, constants["block_values"]))](
        states,
        slots_S,
        is_first_S,
        *(each.contiguous() for each in tokens),
        borders_S,
        output,
        num_tokens,
        num_heads,
        key_width=key_width,
        value_width=value_width,
        has_decay_of_number=num_decays > 1,
        **constants,
        **OPTIONS,
    )
    return output


def delta_rule_constants(key_width: int, value_width: int) -> dict[str, int]:
    block_keys = triton.next_power_of_2(key_width)
    block_values = min(triton.next_power_of_2(value_width), max(1, BLOCK // block_keys))
    return {"block_keys": block_keys, "block_values": block_values}
