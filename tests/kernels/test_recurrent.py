"""Recurrent layers on blocks of tokens: the numbers of one token after the other, in float64; and the same
bits beside any neighbour and in any pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels.recurrent import delta_rule, mamba
from specdist.models.recurrent.kernels import Kernels, Operator, check
from tests.models.recurrent.tokens import NUM_SEQUENCES, TOLERANCE, DeltaTokens, MambaTokens, difference

NUM_TOKENS = (1, 9)


def mamba_arguments(tokens: MambaTokens) -> list[Tensor]:
    """As the operator takes them."""
    return [tokens.state, *tokens.tokens, tokens.rates]


def delta_arguments(tokens: DeltaTokens) -> list[Tensor]:
    return [tokens.state, tokens.queries, tokens.keys, tokens.values, tokens.log_decays, tokens.rates]


def run(operator: Operator, state: Tensor, *parts: Tensor, is_first: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs, and the states of the sequences' slots, among which are others that nobody may touch."""
    slots = torch.arange(len(state), device=state.device).flip(0) * 2 + 1
    held = torch.full((2 * len(state) + 1, *state.shape[1:]), torch.nan, device=state.device)
    held[slots] = state
    outputs = operator(held, slots, torch.full_like(slots, is_first, dtype=torch.bool), *parts)
    assert held[::2].isnan().all()
    return outputs, held[slots]


def borders_of(num_tokens: int) -> list[int]:
    """Of none of the tokens, of all, and between."""
    return [0, num_tokens, num_tokens // 2]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_mamba_is_that_of_one_token_after_the_other(
    version: int, num_tokens: int, device: torch.device
) -> None:
    tokens = MambaTokens(version, num_tokens)
    outputs, states = tokens.one_by_one()
    borders = borders_of(num_tokens)
    arguments = [each.to(device) for each in (*mamba_arguments(tokens), torch.tensor(borders))]
    found, kept = (each.cpu() for each in run(mamba, *arguments))
    assert difference(found, outputs) < TOLERANCE
    assert difference(kept, states[range(NUM_SEQUENCES), borders]) < TOLERANCE


@pytest.mark.parametrize("num_decays", [1, 20])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_the_delta_rule_is_that_of_one_token_after_the_other(
    num_decays: int, num_tokens: int, device: torch.device
) -> None:
    tokens = DeltaTokens(num_tokens, num_decays, (20, 9))
    outputs, states = tokens.one_by_one()
    borders = borders_of(num_tokens)
    arguments = [each.to(device) for each in (*delta_arguments(tokens), torch.tensor(borders))]
    found, kept = (each.cpu() for each in run(delta_rule, *arguments))
    assert difference(found, outputs) < TOLERANCE
    assert difference(kept, states[range(NUM_SEQUENCES), borders]) < TOLERANCE


def test_heads_wider_than_a_program_are_shared_among_several(device: torch.device) -> None:
    """States of 256 numbers, in half precision, side by side with others, as a projection leaves them."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, width, state_size = 4, 2, 24, 256
    row = torch.randn(2, 3, heads * width + 2 * groups * state_size, generator=generator).bfloat16()
    parts = row.split([heads * width, groups * state_size, groups * state_size], dim=-1)
    x, b, c = (
        part.unflatten(-1, sizes)
        for part, sizes in zip(
            parts, [(heads, width), (groups, state_size), (groups, state_size)], strict=True
        )
    )
    steps, rates = torch.rand(2, 3, heads, generator=generator), -torch.rand(heads, generator=generator)
    state, borders = torch.randn(2, heads, width, state_size, generator=generator), torch.tensor([1, 3])
    arguments = [each.to(device) for each in (state, x, steps, b, c, rates, borders)]
    found, kept = (each.cpu() for each in run(mamba, *arguments))
    numbers, states = state.double(), [state.double()]
    for token in range(3):
        step = steps[:, token].double()[..., None, None]
        of_b, of_c = (each[:, token].double().repeat_interleave(2, 1) for each in (b, c))
        numbers = numbers * (step * rates.double()[:, None, None]).exp()
        numbers = numbers + step * x[:, token].double()[..., None] * of_b[:, :, None]
        states.append(numbers)
        assert difference(found[:, token], (numbers * of_c[:, :, None]).sum(-1)) < TOLERANCE
    assert difference(kept, torch.stack([states[1][0], states[3][1]])) < TOLERANCE


@pytest.mark.parametrize("kind", ["mamba 1", "mamba 2", "delta rule"])
def test_a_sequence_has_the_same_bits_alone_and_in_any_pieces(kind: str, device: torch.device) -> None:
    """Also beside one whose numbers are not finite."""
    length, cut = 7, 3
    if kind == "delta rule":
        operator, time, arguments = delta_rule, 2, delta_arguments(DeltaTokens(length, 1, (8, 8)))
    else:
        version = 1 if kind == "mamba 1" else 2
        operator, time, arguments = mamba, 1, mamba_arguments(MambaTokens(version, length))
    # What is of every sequence; rates of Mamba's heads are the layer's.
    of_sequences = range(6 if kind == "delta rule" else 5)
    arguments[0][1] = torch.nan
    arguments = [each.to(device) for each in arguments]
    together, kept = run(operator, *arguments, torch.full((NUM_SEQUENCES,), length, device=device))
    assert together[1].isnan().all() and together[[0, 2]].isfinite().all()
    for sequence in (0, 2):
        own = [
            each[sequence : sequence + 1] if index in of_sequences else each
            for index, each in enumerate(arguments)
        ]
        found, state = [], own[0]
        for begin, end in ((0, cut), (cut, length)):
            piece = [
                each.narrow(time, begin, end - begin) if index in of_sequences else each
                for index, each in enumerate(own[1:], start=1)
            ]
            output, state = run(operator, state, *piece, torch.tensor([end - begin], device=device))
            found.append(output)
        assert torch.equal(torch.cat(found, time)[0], together[sequence])
        assert torch.equal(state[0], kept[sequence])


def test_kernels_are_used_only_if_they_are_right(device: torch.device) -> None:
    kernels = Kernels(mamba, delta_rule)
    check(kernels, device)

    def late(operator: Operator) -> Operator:
        """Of states that are kept one token later."""
        return lambda *arguments: operator(*arguments[:-1], (arguments[-1] + 1).clamp(max=3))

    for wrong in (kernels._replace(mamba=late(mamba)), kernels._replace(delta_rule=late(delta_rule))):
        with pytest.raises(ValueError, match="states differ by"):
            check(wrong, device)


@pytest.mark.parametrize("kind", ["mamba", "delta rule"])
def test_a_sequence_begins_without_a_state_whatever_its_slot_holds(kind: str, device: torch.device) -> None:
    operator, arguments = (
        (mamba, mamba_arguments(MambaTokens(2, 3)))
        if kind == "mamba"
        else (delta_rule, delta_arguments(DeltaTokens(3, 1, (8, 8))))
    )
    state, *parts = (each.to(device) for each in (*arguments, torch.full((NUM_SEQUENCES,), 2)))
    first = run(operator, torch.full_like(state, torch.nan), *parts, is_first=True)
    zeros = run(operator, torch.zeros_like(state), *parts)
    assert all(torch.equal(one, other) for one, other in zip(first, zeros, strict=True))
