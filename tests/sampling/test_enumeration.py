"""The rejection rule by enumeration in float64: accepted mass plus recovered mass is the target's own
distribution."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specdist.sampling.distributions import (
    Dense,
    OneHot,
    SamplingSettings,
    acceptance_probabilities,
    accepted,
    count_accepted,
    distributions_from_logits,
    recovered_distributions,
)

VOCAB_SIZE = 7
SETTINGS = [
    SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in itertools.product((0.5, 1.0, 1.7), (0, 3), (1.0, 0.8))
]
# A probability of 1/2 is known to 1e-16; sums of a handful of them to a little more.
TOLERANCE = 1e-12


def pair_of_distributions(settings: SamplingSettings, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    distributions = distributions_from_logits(logits, settings)
    assert isinstance(distributions, Dense)
    return distributions.probabilities_NV[0].double(), distributions.probabilities_NV[1].double()


def acceptance_probability(target: Tensor, draft: Tensor) -> float:
    """The measure of the u that are accepted, found on the product's own function by bisection."""
    low, high = 0.0, 1.0
    if accepted(target[None], draft[None], torch.tensor([1 - 2.0**-52], dtype=torch.float64)).item():
        return 1.0
    for _ in range(60):
        middle = torch.tensor([(low + high) / 2], dtype=torch.float64)
        is_accepted = accepted(target[None], draft[None], middle).item()
        low, high = (float(middle), high) if is_accepted else (low, float(middle))
    return low


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_accepted_and_recovered_mass_is_the_target_distribution(settings: SamplingSettings) -> None:
    for seed in range(20):
        target, draft = pair_of_distributions(settings, seed)
        # Of each token, that it is drawn and then accepted.
        chances = [
            acceptance_probability(target[token], draft[token]) if draft[token] > 0 else 0.0
            for token in range(VOCAB_SIZE)
        ]
        accepted_V = draft * torch.tensor(chances, dtype=torch.float64)
        residual = recovered_distributions(Dense(target[None]), Dense(draft[None])).probabilities_NV[0]
        distribution = accepted_V + (1 - accepted_V.sum()) * residual
        torch.testing.assert_close(distribution, target, atol=TOLERANCE, rtol=0)
        # The acceptance rate is the overlap of the two distributions (Leviathan et al. 2023, Corollary 3.6).
        torch.testing.assert_close(accepted_V.sum(), torch.minimum(target, draft).sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draw_gives_every_token_an_interval_as_long_as_its_probability(settings: SamplingSettings) -> None:
    distribution, _ = pair_of_distributions(settings, seed=3)
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), distribution.cumsum(0)])
    for token in range(VOCAB_SIZE):
        if distribution[token] > 0:
            inside = torch.stack([edges[token] + 1e-12, edges[token + 1] - 1e-12])
            assert Dense(distribution.expand(2, -1)).draw(inside).tolist() == [token, token]


def test_draw_never_takes_a_token_without_probability() -> None:
    distribution = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float32).expand(4, -1)
    edges = torch.tensor([0.0, 0.5, 0.5 - 2.0**-53, 1 - 2.0**-52], dtype=torch.float64)
    assert Dense(distribution).draw(edges).tolist() == [1, 3, 1, 3]


def test_greedy_is_the_one_hot_distribution_through_the_same_path() -> None:
    """The one-hot shortcut against dense rows of zeros and ones, through every step."""
    logits = torch.randn(50, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    target = distributions_from_logits(logits[:25], SamplingSettings(temperature=0.0))
    draft = distributions_from_logits(logits[25:], SamplingSettings(temperature=0.0))
    assert isinstance(target, OneHot) and isinstance(draft, OneHot)
    dense_target, dense_draft = (
        Dense(torch.nn.functional.one_hot(distribution.token_ids_N, VOCAB_SIZE).float())
        for distribution in (target, draft)
    )
    uniforms = torch.linspace(0, 0.999, 25, dtype=torch.float64)
    drawn = draft.draw(uniforms)
    assert torch.equal(drawn, dense_draft.draw(uniforms))
    flags, dense_flags = (
        accepted(one.probabilities_of(drawn), other.probabilities_of(drawn), uniforms)
        for one, other in ((target, draft), (dense_target, dense_draft))
    )
    assert torch.equal(flags, dense_flags)
    rejected = np.flatnonzero(~flags)
    recovered = target.select(rejected).token_ids_N
    residual = recovered_distributions(dense_target.select(rejected), dense_draft.select(rejected))
    dense_recovered = residual.draw(uniforms[rejected])
    assert torch.equal(recovered, dense_recovered)


def test_filters_equal_transformers_own() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(200, 50, generator=torch.Generator().manual_seed(11))
    for temperature, top_k, top_p in itertools.product((0.7, 1.3), (0, 1, 10, 80), (1.0, 0.9, 0.3)):
        scores = TemperatureLogitsWarper(temperature)(None, logits)
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        distributions = distributions_from_logits(
            logits, SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
        )
        assert isinstance(distributions, Dense)
        torch.testing.assert_close(distributions.probabilities_NV, scores.softmax(-1), atol=1e-7, rtol=1e-6)


def test_a_block_is_cut_at_its_first_rejection() -> None:
    flags = np.array([True, False, True, True, True, False])
    assert count_accepted(flags, np.array([3, 0, 2, 1])).tolist() == [1, 0, 2, 0]
    assert count_accepted(flags[:0], np.array([0, 0])).tolist() == [0, 0]


def test_equal_probabilities_accept_every_number() -> None:
    """u < P/Q with P = Q must hold for every u in [0, 1): rounding of the ratio must not reject."""
    probabilities = torch.rand(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float32).double()
    largest = torch.full((1000,), 1 - 2.0**-52, dtype=torch.float64)
    assert bool(accepted(probabilities, probabilities, largest).all())


def test_the_number_0_accepts_nothing_impossible() -> None:
    """u is 0 once in 2**52 draws, and P(y) = 0 is what top-k and top-p make of most tokens."""
    zeros = torch.zeros(3, dtype=torch.float64)
    draft = torch.tensor([1.0, 0.5, 1e-30], dtype=torch.float64)
    assert not accepted(zeros, draft, zeros).any()
    assert accepted(torch.full_like(zeros, 1e-30), draft, zeros).all()


def test_nan_accepts_nothing_and_chances_are_ratios() -> None:
    target = torch.tensor([0.2, 0.6, 0.0, 0.0], dtype=torch.float64)
    draft = torch.tensor([0.4, 0.3, 0.5, 0.0], dtype=torch.float64)
    assert acceptance_probabilities(target.numpy(), draft.numpy()).tolist() == [0.5, 1.0, 0.0, 0.0]
    assert not accepted(target * torch.nan, draft, torch.zeros(4, dtype=torch.float64)).any()


def test_equals_at_the_edge_of_a_filter_are_all_kept() -> None:
    """Where a filter's edge falls between tokens of equal probability, and exactly on a sum of them.

    So does transformers' top-k. Its top-p keeps those that a sort puts last, which is not the same on every
    device: it is the same as here where the edge falls between different tokens.
    """
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    # Four equal tokens have 1/4 each, without rounding; the last row has one token that is nearly certain.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0], [40.0, 0, 0, 0]])
    for top_p, num_kept in (
        (0.25, [4, 1, 2, 1]),
        (0.5, [4, 4, 2, 1]),
        (0.75, [4, 4, 4, 1]),
        (0.6, [4, 4, 2, 1]),
        (1e-9, [4, 1, 2, 1]),
    ):
        distributions = distributions_from_logits(logits, SamplingSettings(top_p=top_p))
        assert isinstance(distributions, Dense)
        probabilities = distributions.probabilities_NV
        assert (probabilities > 0).sum(1).tolist() == num_kept, top_p
        expected = logits.masked_fill(probabilities == 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(probabilities, expected, atol=1e-7, rtol=1e-6)
        distinct = logits + torch.arange(4) / 8
        found = distributions_from_logits(distinct, SamplingSettings(top_p=top_p))
        assert isinstance(found, Dense)
        expected = TopPLogitsWarper(top_p)(None, distinct).softmax(-1)
        torch.testing.assert_close(found.probabilities_NV, expected, atol=1e-7, rtol=1e-6)
    # 1/2, 1/4, 1/8, 1/8: a token goes that, with all below it, has exactly the rest.
    halves = torch.tensor([[2.0, 1.0, 0.0, 0.0]]) * math.log(2)
    assert halves.softmax(-1).tolist() == [[1 / 2, 1 / 4, 1 / 8, 1 / 8]]
    kept = distributions_from_logits(halves, SamplingSettings(top_p=0.5))
    assert isinstance(kept, Dense)
    assert kept.probabilities_NV.tolist() == [[1, 0, 0, 0]]
    for top_k, num_kept in ((1, [4, 1, 2, 1]), (2, [4, 4, 2, 4]), (3, [4, 4, 4, 4])):
        distributions = distributions_from_logits(logits, SamplingSettings(top_k=top_k))
        assert isinstance(distributions, Dense)
        assert (distributions.probabilities_NV > 0).sum(1).tolist()[:3] == num_kept[:3]
        expected = TopKLogitsWarper(top_k)(None, logits).softmax(-1)
        torch.testing.assert_close(distributions.probabilities_NV, expected, atol=1e-7, rtol=1e-6)
