"""Mamba's tokens, in any pieces: the numbers of one after the other, and of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from specdist.models.recurrent import mamba
from specdist.models.recurrent.kinds import mixer_of
from specdist.models.recurrent.runs import Runs, padded_of
from tests.models.all_families import build
from tests.models.recurrent.tokens import NUM_SEQUENCES, TOLERANCE, MambaTokens, difference


def run(
    tokens: MambaTokens, begin: int, end: int, state: Tensor, borders: list[int]
) -> tuple[Tensor, Tensor]:
    """Of the tokens from ``begin`` on: outputs, and states after ``borders`` of them."""
    run_tokens = mamba.run_mamba1 if tokens.rates.dim() == 2 else mamba.run_mamba2
    return run_tokens(state, tokens.tokens.chunk(begin, end), tokens.rates, torch.tensor(borders))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 17, 200])
def test_any_number_of_tokens_gives_the_numbers_of_one_after_the_other(version: int, num_tokens: int) -> None:
    """And the state of each sequence at a border of its own."""
    tokens = MambaTokens(version, num_tokens)
    outputs, states = tokens.one_by_one()
    borders = [0, num_tokens, num_tokens // 2]
    found, kept = run(tokens, 0, num_tokens, tokens.state, borders)
    assert difference(found, outputs) < TOLERANCE
    assert difference(kept, states[range(NUM_SEQUENCES), borders]) < TOLERANCE


@pytest.mark.parametrize("version", [1, 2])
def test_states_do_not_drift_in_a_thousand_rounds(version: int) -> None:
    """Each runs a block, and keeps the state after some of its tokens."""
    tokens = MambaTokens(version, 1010)
    outputs, states = tokens.one_by_one()
    generator, place, state, worst = torch.Generator().manual_seed(1), 0, tokens.state, 0.0
    for _ in range(1000):
        length, accepted = torch.randint(1, 9, (2,), generator=generator).tolist()
        accepted = int(accepted <= length)
        found, state = run(tokens, place, place + length, state, [accepted] * NUM_SEQUENCES)
        worst = max(worst, difference(found, outputs[:, place : place + length]))
        place += accepted
    assert place > 500
    assert worst < TOLERANCE and difference(state, states[:, place]) < TOLERANCE


@pytest.mark.parametrize("version", [1, 2])
def test_transformers_functions_give_the_same_numbers(version: int) -> None:
    tokens = MambaTokens(version, 150)
    found, _ = run(tokens, 0, 150, torch.zeros_like(tokens.state), [0] * NUM_SEQUENCES)
    x, steps, b, c = tokens.tokens
    if version == 1:
        x, steps, b, c = (part.transpose(1, 2) for part in (x[:, :, 0], steps, b[:, :, 0], c[:, :, 0]))
        wanted = mamba_selective_scan(x, steps, tokens.rates, b, c).transpose(1, 2)[:, :, None]
    else:
        wanted = mamba2_chunk_scan(x, steps, tokens.rates, b, c, chunk_size=16)
    assert difference(found, wanted.double()) < TOLERANCE


FAMILIES = ("mamba", "falcon_mamba", "mamba2", "nemotron_h", "falcon_h1", "zamba2")


def runs(first: int, end: int, border: int, *, is_first: bool = False) -> list[Runs]:
    """Of one segment, places in the line of those that are run."""
    numbers = np.array([[0], [is_first], [first], [end], [border]])
    return [Runs(torch.from_numpy(numbers), padded_of(numbers, torch.device("cpu")))]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_modules_give_the_numbers_of_their_own_forward(family: str) -> None:
    """A block that follows tokens which may still be rolled back, from the state before these: all with
    weights that differ from head to head."""
    torch.manual_seed(0)
    model = build(family)
    mixers = [mixer for module in model.modules() if (mixer := mixer_of(module)) is not None]
    assert mixers and all(isinstance(mixer, (mamba.Mamba1, mamba.Mamba2)) for mixer in mixers)
    mixer: Any = mixers[0]
    for name, parameter in mixer.module.named_parameters():
        if name in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "dt_proj.bias"):
            parameter += 0.3 * torch.randn_like(parameter)
    if family == "falcon_h1":
        mixer.module.ssm_in_multiplier = 1.5
        mixer.module.mup_vector += 0.3 * torch.randn_like(mixer.module.mup_vector)
    hidden = torch.randn(1, 20, model.config.hidden_size)
    wanted = mixer.module(hidden)[0]
    rows, rest = mixer.project(hidden[0])
    num_before, width = mixer.shape.num_before, rows.shape[1]
    held, others = torch.ones(2, 1, *mixer.shape.state)
    first = torch.cat((torch.zeros(num_before, width), rows[:12]))
    mixed = mixer.scan(first, held, runs(0, 12, 7, is_first=True))
    found = [mixer.output(mixed, rest[:12])]
    # Five of the twelve are run again, and then the others, beside places without a token.
    second = torch.cat((torch.zeros(2, width), rows[7 - num_before :], torch.zeros(2, width)))
    mixed = mixer.scan(second, held, runs(2, 15, 4))
    found.append(mixer.output(mixed[7:15], rest[12:]))
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    mixer.scan(first, others, runs(0, 12, 9, is_first=True))
    largest = float(others.abs().max())
    torch.testing.assert_close(held, others, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize(("num_groups", "num_pieces"), [(1, 0), (2, 2), (8, 8)])
def test_a_mixer_is_cut_between_groups(num_groups: int, num_pieces: int) -> None:
    """If groups did not count, ranks would have parts of one's B and C, and only
    runs of a sharded model of that family would notice."""
    channels = 256 + 2 * num_groups * 16
    module: Any = SimpleNamespace(
        A_log=torch.zeros(8), head_dim=32, ssm_state_size=16,
        conv1d=SimpleNamespace(weight=torch.zeros(channels, 1, 4)),
    )  # fmt: skip
    mixer = mamba.Mamba2(module)
    assert mixer.num_pieces == num_pieces and bool(mixer.cuts) == bool(num_pieces)
