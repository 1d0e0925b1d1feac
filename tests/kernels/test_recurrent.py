"""Recurrent layers on blocks of tokens: the numbers of one token after the other, in float64; and the same
bits beside any neighbour and in any pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels.recurrent import delta_rule, mamba
from specdist.models.recurrent.kernels import Kernels, Operator, check
from specdist.models.recurrent.mamba import Mamba2Tokens
from tests.models.recurrent.tokens import (
    NUM_SEQUENCES,
    TOLERANCE,
    DeltaTokens,
    MambaTokens,
    difference,
    in_line,
    runs_of,
)

NUM_TOKENS = (1, 6)


def mamba_arguments(tokens: MambaTokens) -> list[Tensor]:
    """Sequences' states, and tokens as the operator takes them."""
    return [tokens.state, *map(in_line, tokens.tokens), tokens.rates]


def delta_arguments(tokens: DeltaTokens) -> list[Tensor]:
    return [tokens.state, *tokens.in_line()]


def operator_of(kind: str, num_tokens: int) -> tuple[Operator, list[Tensor]]:
    """And some arguments."""
    if kind == "delta rule":
        return delta_rule, delta_arguments(DeltaTokens(num_tokens, 1, (8, 8)))
    return mamba, mamba_arguments(MambaTokens(1 if kind == "mamba 1" else 2, num_tokens))


def run(
    operator: Operator,
    num_tokens: int,
    borders: Sequence[int],
    state: Tensor,
    *parts: Tensor,
    is_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [S, L, H, ...], and the states of the sequences' slots, among which are others that nobody may
    touch, like the places between."""
    slots = torch.arange(len(state)).flip(0) * 2 + 1
    held = torch.full((2 * len(state) + 1, *state.shape[1:]), torch.nan, device=state.device)
    held[slots] = state
    runs = runs_of(num_tokens, slots, borders, is_first=is_first).to(state.device)
    width = parts[2 if operator is delta_rule else 0].shape[-1]
    output = torch.full((len(parts[0]), state.shape[1], width), torch.nan, device=state.device)
    operator(output, held, runs, *parts)
    assert held[::2].isnan().all() and output[:: num_tokens + 1].isnan().all()
    return output.unflatten(0, (-1, num_tokens + 1))[:, 1:], held[slots]


def borders_of(num_tokens: int) -> list[int]:
    """Of none of the tokens, of all, and between."""
    return [0, num_tokens, num_tokens // 2]


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("kind", ["mamba 1", "mamba 2", "delta rule", "delta rule, fine decays"])
def test_outputs_are_those_of_one_token_after_the_other(
    kind: str, num_tokens: int, device: torch.device
) -> None:
    tokens: MambaTokens | DeltaTokens
    if kind.startswith("mamba"):
        tokens = MambaTokens(int(kind[-1]), num_tokens)
        operator, arguments = mamba, mamba_arguments(tokens)
    else:
        tokens = DeltaTokens(num_tokens, 20 if "fine" in kind else 1, (20, 9))
        operator, arguments = delta_rule, delta_arguments(tokens)
    outputs, states = tokens.one_by_one()
    borders = borders_of(num_tokens)
    found, kept = (
        each.cpu() for each in run(operator, num_tokens, borders, *(x.to(device) for x in arguments))
    )
    assert difference(found if operator is mamba else found.transpose(1, 2), outputs) < TOLERANCE
    assert difference(kept, states[range(NUM_SEQUENCES), borders]) < TOLERANCE


def test_heads_wider_than_a_program_are_shared_among_several(device: torch.device) -> None:
    """States of 256 numbers, in half precision, side by side with others, as a projection leaves them."""
    tokens = MambaTokens(2, 3, sizes=(4, 24, 2, 256))
    x, steps, b, c = tokens.tokens
    row = torch.cat([part.flatten(2) for part in (x, b, c)], dim=-1).bfloat16()
    parts = row.split([each.shape[2:].numel() for each in (x, b, c)], dim=-1)
    x, b, c = (part.unflatten(-1, each.shape[2:]) for part, each in zip(parts, (x, b, c), strict=True))
    tokens.tokens = Mamba2Tokens(x, steps, b, c)
    outputs, states = tokens.one_by_one()
    in_lines = in_line(row).split([part.shape[-1] for part in parts], dim=-1)
    x, b, c = (line.unflatten(-1, each.shape[2:]) for line, each in zip(in_lines, (x, b, c), strict=True))
    arguments = [each.to(device) for each in (tokens.state, x, in_line(steps), b, c, tokens.rates)]
    found, kept = (each.cpu() for each in run(mamba, 3, borders_of(3), *arguments))
    assert difference(found, outputs) < TOLERANCE
    assert difference(kept, states[range(NUM_SEQUENCES), borders_of(3)]) < TOLERANCE


@pytest.mark.parametrize("kind", ["mamba 1", "mamba 2", "delta rule"])
def test_a_sequence_has_the_same_bits_alone_and_in_any_pieces(kind: str, device: torch.device) -> None:
    """Also beside one whose numbers are not finite."""
    length, cut = 7, 3
    operator, arguments = operator_of(kind, length)
    arguments[0][1] = torch.nan
    state, *parts = (each.to(device) for each in arguments)
    together, kept = run(operator, length, NUM_SEQUENCES * [length], state, *parts)
    assert together[1].isnan().all() and together[[0, 2]].isfinite().all()
    for sequence in (0, 2):
        held, slot = state[sequence : sequence + 1].clone(), torch.zeros(1, dtype=torch.int64)
        found = torch.full((len(parts[0]), *together.shape[2:]), torch.nan, device=device)
        for begin, end in ((0, cut), (cut, length)):
            first = sequence * (length + 1) + 1
            numbers = runs_of(end - begin, slot, [end - begin], begin=begin) + torch.tensor([0, 0, 1, 1, 1])[
                :, None
            ] * (first - 1)
            operator(found, held, numbers.to(device), *parts)
        assert torch.equal(found.unflatten(0, (-1, length + 1))[sequence, 1:], together[sequence])
        assert torch.equal(held[0], kept[sequence])


def test_kernels_are_used_only_if_they_are_right(device: torch.device) -> None:
    kernels = Kernels(mamba, delta_rule)
    check(kernels, device)

    def late(operator: Operator) -> Operator:
        """Of states that are kept one token later."""

        def run(output: Tensor, held: Tensor, runs: Tensor, *parts: Tensor) -> None:
            operator(output, held, torch.stack((*runs[:4], torch.minimum(runs[3], runs[4] + 1))), *parts)

        return run

    for wrong in (kernels._replace(mamba=late(mamba)), kernels._replace(delta_rule=late(delta_rule))):
        with pytest.raises(ValueError, match="states differ by"):
            check(wrong, device)


@pytest.mark.parametrize("kind", ["mamba 2", "delta rule"])
def test_a_sequence_begins_without_a_state_whatever_its_slot_holds(kind: str, device: torch.device) -> None:
    operator, arguments = operator_of(kind, 3)
    state, *parts = (each.to(device) for each in arguments)
    borders = NUM_SEQUENCES * [2]
    first = run(operator, 3, borders, torch.full_like(state, torch.nan), *parts, is_first=True)
    zeros = run(operator, 3, borders, torch.zeros_like(state), *parts)
    assert all(torch.equal(one, other) for one, other in zip(first, zeros, strict=True))


@pytest.mark.parametrize("kind", ["mamba 2", "delta rule"])
def test_without_a_border_nothing_is_left_and_without_tokens_nothing_is_written(
    kind: str, device: torch.device
) -> None:
    """As of recordings, and of padding."""
    operator, arguments = operator_of(kind, 3)
    state, *parts = (each.to(device) for each in arguments)
    wanted, _ = run(operator, 3, NUM_SEQUENCES * [0], state, *parts)
    held, slots = state.clone(), torch.arange(NUM_SEQUENCES)
    runs = runs_of(3, slots, [-9, -9, -9])
    runs[3, 1] = runs[2, 1]
    output = torch.full((len(parts[0]), *wanted.shape[2:]), torch.nan, device=device)
    operator(output, held, runs.to(device), *parts)
    assert torch.equal(held, state)
    found = output.unflatten(0, (-1, 4))[:, 1:]
    assert torch.equal(found[[0, 2]], wanted[[0, 2]]) and found[1].isnan().all()
