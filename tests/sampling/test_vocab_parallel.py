"""A sharded vocabulary gives the results of the whole one: tokens exactly, probabilities up to rounding."""

import itertools

import pytest
import torch
from torch import Tensor

from specdist.sampling.coupling import next_token_distributions, waiting_times
from specdist.sampling.distributions import (
    NOT_FINITE,
    Dense,
    OneHot,
    SamplingSettings,
    distributions_from_logits,
)
from specdist.sampling.keys import stream_key
from specdist.sampling.processing.row_filters import tempered
from specdist.sampling.vocab_parallel import (
    candidate_probabilities,
    likeliest,
    log_normalisers,
    merge_winners,
    own_scores,
    race_winners,
    top_scores,
    vocab_ranges,
    without_the_rest,
)

NUM_ROWS = 400
VOCAB_SIZE = 13
CUTS = [
    [range(13)],
    [range(7), range(7, 13)],
    [range(1), range(1, 11), range(11, 13)],
    [range(index, index + 1) for index in range(13)],
]
NO_FILTER, TOP_K, TOP_MANY = 0, 3, 40


def random_logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return 2 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)).to(dtype)


def logits_with_ties() -> Tensor:
    """Four values only, so that nearly every row ties at its maximum and at every threshold."""
    logits = torch.randint(0, 4, (NUM_ROWS, VOCAB_SIZE), generator=torch.Generator().manual_seed(5)).float()
    return logits.masked_fill(logits == 0, -torch.inf).index_fill(1, torch.tensor([6]), 1.0)


def logits_far_out() -> Tensor:
    """Exponentials of these overflow or vanish, and whole slices have no probability."""
    return random_logits() + torch.tensor([-1e4, 0.0, 1e4]).repeat(5)[:VOCAB_SIZE]


LOGITS = {"random": random_logits(), "ties": logits_with_ties(), "far out": logits_far_out()}


def sliced_scores(logits: Tensor, cut: list[range], settings: SamplingSettings) -> list[Tensor]:
    parts = [tempered(logits[:, ids.start : ids.stop], settings.temperature) for ids in cut]
    if not settings.top_k:
        return parts
    tops = torch.stack([top_scores(part, settings.top_k) for part in parts])
    return [without_the_rest(part, tops) for part in parts]


@pytest.mark.parametrize("cut", CUTS, ids=len)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_likeliest_token_is_the_lowest_of_equals(kind: str, cut: list[range], dtype: torch.dtype) -> None:
    logits = LOGITS[kind].to(dtype)
    winners = [likeliest(logits[:, ids.start : ids.stop], ids).packed() for ids in cut]
    assert torch.equal(merge_winners(torch.stack(winners)).token_ids_N, logits.argmax(dim=1))


@pytest.mark.parametrize("cut", CUTS, ids=len)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("top_k", [NO_FILTER, TOP_K])
def test_the_race_has_the_same_winner(kind: str, cut: list[range], top_k: int) -> None:
    settings = SamplingSettings(temperature=0.8, top_k=top_k, is_coupled=True)
    keys = torch.tensor([stream_key(1, row, 0) for row in range(NUM_ROWS)])
    positions = torch.arange(NUM_ROWS) % 7
    whole = next_token_distributions(LOGITS[kind], settings, keys, positions)
    assert isinstance(whole, OneHot)
    parts = sliced_scores(LOGITS[kind], cut, settings)
    winners = [
        race_winners(part, ids, keys, positions).packed() for part, ids in zip(parts, cut, strict=True)
    ]
    assert torch.equal(merge_winners(torch.stack(winners)).token_ids_N, whole.token_ids_N)


def test_noise_is_the_tokens_own() -> None:
    keys, positions = torch.tensor([stream_key(0, row, 0) for row in range(5)]), torch.arange(5)
    device = torch.device("cpu")
    whole = waiting_times(keys, positions, range(VOCAB_SIZE), device)
    for ids in (ids for cut in CUTS for ids in cut):
        assert torch.equal(waiting_times(keys, positions, ids, device), whole[:, ids.start : ids.stop])


@pytest.mark.parametrize("cut", CUTS, ids=len)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("top_k", [NO_FILTER, TOP_K, TOP_MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_token_has_its_probability(kind: str, cut: list[range], top_k: int, dtype: torch.dtype) -> None:
    logits = LOGITS[kind].to(dtype)
    settings = SamplingSettings(temperature=0.8, top_k=top_k)
    whole = distributions_from_logits(logits, settings)
    assert isinstance(whole, Dense)
    parts = sliced_scores(logits, cut, settings)
    # Every id of every row is a candidate.
    pairs = torch.tensor(list(itertools.product(range(NUM_ROWS), range(VOCAB_SIZE))))
    rows, token_ids = pairs.T
    found = candidate_probabilities(
        torch.stack([log_normalisers(part) for part in parts]),
        torch.stack([own_scores(part, ids, rows, token_ids) for part, ids in zip(parts, cut, strict=True)]),
        rows,
    )
    expected = whole.probabilities_NV.double().flatten()
    assert torch.equal(found == 0, expected == 0) or kind == "far out"
    # Rounding of the precision's own exponentials, and in float64 of a logarithm of 1e4.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_no_slice_has_an_id_of_the_padding() -> None:
    """A draft cannot draw such an id; if it came from elsewhere, it would have no probability."""
    found = own_scores(
        torch.zeros(1, 3), range(4, 7), torch.zeros(4, dtype=torch.int64), torch.tensor([3, 4, 6, 7])
    )
    assert found.tolist() == [-torch.inf, 0, 0, -torch.inf]


@pytest.mark.parametrize(("vocab_size", "num_slices"), [(8, 2), (7, 2), (151_665, 4), (5, 5)])
def test_slices_tile_the_vocabulary(vocab_size: int, num_slices: int) -> None:
    slices = vocab_ranges(vocab_size, num_slices)
    assert list(itertools.chain(*slices)) == list(range(vocab_size))
    widths = [len(ids) for ids in slices]
    assert len(widths) == num_slices and max(widths) - min(widths) <= 1 and max(widths) == widths[0]


def test_a_slice_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="4 token ids cannot be cut into 5"):
        vocab_ranges(4, 5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_coupled", [False, True])
def test_a_row_that_is_not_finite_in_one_slice_has_no_winner(value: float, is_coupled: bool) -> None:
    """Wherever it is, and although the other slices know nothing of it; nor do the other rows."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(12, 11, generator=generator)
    keys_N, positions_N = torch.arange(12), torch.arange(12) + 5
    settings = SamplingSettings(temperature=float(is_coupled), is_coupled=is_coupled)
    undisturbed = next_token_distributions(logits_NV, settings, keys_N, positions_N)
    assert isinstance(undisturbed, OneHot)
    for token_id in range(11):
        logits_NV[token_id, token_id] = value
    packed = []
    for ids in vocab_ranges(11, 3):
        part_Nv = logits_NV[:, ids.start : ids.stop]
        winners = race_winners(part_Nv, ids, keys_N, positions_N) if is_coupled else likeliest(part_Nv, ids)
        packed.append(winners.packed())
    expected = [NOT_FINITE] * 11 + undisturbed.token_ids_N.tolist()[11:]
    assert merge_winners(torch.stack(packed)).token_ids_N.tolist() == expected
    whole = next_token_distributions(logits_NV, settings, keys_N, positions_N)
    assert isinstance(whole, OneHot) and whole.token_ids_N.tolist() == expected
