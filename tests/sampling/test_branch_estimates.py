"""What is known of a drawn token, against the definitions in float64."""

from __future__ import annotations

import pytest
import torch

from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.distributions import Dense, SamplingSettings, distributions_from_logits

PLAIN = SamplingSettings()
SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "plain": PLAIN,
    "filtered": SamplingSettings(temperature=0.7, top_k=40, top_p=0.9),
    "gumbel": SamplingSettings(temperature=1.3, top_p=0.8, is_coupled=True),
}


@pytest.mark.parametrize("sampling", list(SETTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_features_are_those_of_the_distribution_that_the_token_was_drawn_from(
    sampling: str, dtype: torch.dtype
) -> None:
    """From nearly even to certain, and with logits far from zero. Under greedy it is the softmax's."""
    settings = SETTINGS[sampling]
    spreads = torch.tensor([0.01, 1.0, 5.0, 400.0])[:, None]
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * spreads + 30).to(dtype)
    keys = torch.arange(4)
    distributions, _, undecided = draft_distributions(logits, settings, keys, keys)
    assert (undecided is None) == settings.is_greedy
    drawn = distributions.draw(torch.tensor([0.3, 0.7, 0.9, 0.5], dtype=torch.float64))
    found = draft_features(logits, undecided, drawn, settings)
    assert (found.shape, found.dtype) == ((3, 4), torch.float32)
    distribution = distributions_from_logits(logits.double(), PLAIN if settings.is_greedy else settings)
    assert isinstance(distribution, Dense)
    exact = distribution.probabilities_NV
    torch.testing.assert_close(
        found.double(),
        torch.stack([torch.special.entr(exact).sum(1), distribution.probabilities_of(drawn), exact.amax(1)]),
        # Sums of three hundred products in single precision, of logits up to a thousand.
        atol=2e-4,
        rtol=1e-4,
    )
    assert float(found[0].min()) >= 0
