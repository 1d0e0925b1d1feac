"""Processed distributions and draws: those of the plain implementation, and the same whatever is beside
them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is made for Linux)")

from specdist.kernels.filters import BLOCK, NUM_DIGITS, processed_probabilities
from specdist.kernels.sampling import draw, race
from specdist.sampling.coupling import coupled_draws
from specdist.sampling.distributions import NOT_FINITE, Dense
from specdist.sampling.keys import stream_key
from specdist.sampling.processing.row_filters import plain_probabilities
from specdist.sampling.random import Purpose, hash_words

# Two parts, of which the last is short.
VOCAB_SIZE, THREE_PARTS = BLOCK + 300, 3 * BLOCK - 300
FILTERS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (0.7, 0, 0.9), (1.3, 20, 0.5)]


def random_logits(num_rows: int, dtype: torch.dtype, device: torch.device, width: int = VOCAB_SIZE) -> Tensor:
    """Rows that differ in how far their logits are apart: some of them are near the largest one, nearly all,
    or few."""
    generator = torch.Generator().manual_seed(0)
    spreads_N1 = torch.tensor([3.0, 0.3, 10.0]).repeat(num_rows)[:num_rows, None]
    return (spreads_N1 * torch.randn(num_rows, width, generator=generator)).to(device, dtype)


def plain(logits_NV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    return plain_probabilities(logits_NV, temperature=temperature, top_k=top_k, top_p=top_p)


def processed_probabilities_of(logits_NV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    found_NV = processed_probabilities(logits_NV, temperature=temperature, top_k=top_k, top_p=top_p)
    assert isinstance(found_NV, Tensor)
    return found_NV


# Each choice of filters in one precision.
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "dtype"),
    [(*each, list(NUM_DIGITS)[place % len(NUM_DIGITS)]) for place, each in enumerate(FILTERS)],
)
def test_the_distributions_are_the_plain_ones(
    temperature: float, top_k: int, top_p: float, dtype: torch.dtype, device: torch.device
) -> None:
    """In bfloat16 many logits are equal: all that tie with the least likely one are kept on both sides."""
    logits = random_logits(3, dtype, device)
    found = processed_probabilities_of(logits, temperature, top_k, top_p)
    expected = plain(logits.double(), temperature, top_k, top_p)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() <= 1e-6


def test_by_enumeration(device: torch.device) -> None:
    """Masses 0.4, 0.2, 0.2, 0.1, 0.1: which ids each top_p keeps, ties and borders included."""
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]], device=device).log()
    for top_p, kept in (
        (0.0, [2]),
        (0.39, [2]),
        (0.41, [1, 2, 3]),
        (0.79, [1, 2, 3]),
        (0.81, [0, 1, 2, 3, 4]),
    ):
        found = processed_probabilities(logits, temperature=1.0, top_k=0, top_p=top_p)
        assert found[0].nonzero()[:, 0].tolist() == kept, top_p
        assert torch.allclose(found.sum(), torch.ones((), device=device))
    for top_k, kept in ((1, [2]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3, 4])):
        found = processed_probabilities(logits, temperature=1.0, top_k=top_k, top_p=1.0)
        assert found[0].nonzero()[:, 0].tolist() == kept, top_k


def test_ids_far_below_the_largest_count_too(device: torch.device) -> None:
    """What is near the largest logit may have too little mass, or too few ids: here one id, and many others
    nine nats below it, a quarter of the mass in all."""
    logits = torch.full((1, VOCAB_SIZE), -9.0, dtype=torch.bfloat16, device=device)
    logits[0, ::2], logits[0, 3001] = -9.125, 0.0
    for settings, num_kept in (
        ((1.0, 0, 0.7), VOCAB_SIZE // 2),
        ((1.0, 2, 0.9), VOCAB_SIZE // 2),
        ((1.0, VOCAB_SIZE // 2 + 1, 0.99), VOCAB_SIZE),
    ):
        found = processed_probabilities_of(logits, *settings)
        expected = plain(logits.double(), *settings)
        assert int((found > 0).sum()) == num_kept, settings
        assert (found - expected).abs().max() <= 1e-6


def test_what_memory_held_before_changes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are listed where the probabilities will be, with gaps."""
    logits, settings = random_logits(3, torch.bfloat16, device), (1.0, 5, 0.9)
    expected = processed_probabilities_of(logits, *settings)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 100.0, **options))
    assert torch.equal(processed_probabilities_of(logits, *settings), expected)


def test_ids_without_mass_are_fewer_than_top_k(device: torch.device) -> None:
    """As where a grammar permits two tokens."""
    logits = torch.full((1, VOCAB_SIZE), -torch.inf, device=device)
    logits[0, [5, 4200]] = torch.tensor([1.0, 0.0], device=device)
    for settings in ((1.0, 5, 0.9), (1.0, 0, 0.9)):
        found = processed_probabilities_of(logits, *settings)
        assert found[0].nonzero()[:, 0].tolist() == [5, 4200]
        assert (found - plain(logits.double(), *settings)).abs().max() <= 1e-6


def test_logits_that_are_not_finite_give_no_distribution(device: torch.device) -> None:
    logits = random_logits(4, torch.float32, device, width=40)
    logits[0, 3], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 7] = -torch.inf
    uniforms = torch.full((4,), 0.5, dtype=torch.float64, device=device)
    words = torch.arange(4, device=device)
    for top_k, top_p in ((0, 1.0), (5, 0.9)):
        found = processed_probabilities(logits, temperature=1.0, top_k=top_k, top_p=top_p)
        for drawn in (
            draw(found, uniforms, not_finite=NOT_FINITE),
            race(found, words, not_finite=NOT_FINITE),
        ):
            assert drawn[:3].tolist() == [NOT_FINITE] * 3
            assert drawn[3] >= 0 and drawn[3] != 7


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bit by bit, so target and draft form equal distributions of equal logits."""
    logits = random_logits(2, torch.bfloat16, device)
    together = processed_probabilities(logits, temperature=0.8, top_k=50, top_p=0.9)
    strided = torch.cat([logits, logits], dim=1)[:, :VOCAB_SIZE]
    for index in range(2):
        alone = processed_probabilities(strided[index : index + 1], temperature=0.8, top_k=50, top_p=0.9)
        assert torch.equal(alone[0], together[index])


def test_draws_are_the_plain_ones(device: torch.device) -> None:
    probabilities = plain(random_logits(8, torch.float32, device, width=THREE_PARTS), 0.9, 0, 0.97)
    uniforms = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    uniforms[0], uniforms[1] = 0, 1 - 2.0**-52
    expected = Dense(probabilities).draw(uniforms)
    assert torch.equal(draw(probabilities, uniforms, not_finite=NOT_FINITE), expected)
    assert len(expected.unique()) > 4


def test_shared_draws_are_the_plain_ones(device: torch.device) -> None:
    """The same noise, and in a slice of the vocabulary the noise of the slice's ids."""
    probabilities = plain(random_logits(6, torch.float32, device, width=THREE_PARTS), 0.9, 0, 0.97)
    keys, positions = torch.tensor([stream_key(3, row, 1) for row in range(6)]), torch.arange(6)
    words = hash_words(keys, positions, torch.zeros_like(positions), Purpose.COUPLE).to(device)
    expected = coupled_draws(Dense(probabilities), keys, positions).token_ids_N
    assert torch.equal(race(probabilities, words, not_finite=NOT_FINITE), expected)
    first = int(expected.min())
    in_slice = race(probabilities[:, first:].contiguous(), words, not_finite=NOT_FINITE, first_id=first)
    assert torch.equal(in_slice + first, expected)
