"""The formulas against simulation, and against each other."""

import numpy as np
import pytest

from specdist.theory import (
    best_length,
    ready_share,
    stopping_threshold,
    tokens_per_call,
    tokens_per_pass_ahead,
    wall_time_factor,
)


@pytest.mark.parametrize("caught", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_candidates", [0, 1, 5])
def test_rounds_with_a_draft_ahead(num_candidates: int, caught: float) -> None:
    acceptance, num_rounds = 0.7, 40_000
    generator = np.random.default_rng(0)
    is_ready, num_ready, num_tokens = False, 0, 0
    for _ in range(num_rounds):
        count = num_candidates if is_ready else 0
        num_ready += is_ready
        num_accepted = 0
        while num_accepted < count and generator.random() < acceptance:
            num_accepted += 1
        num_tokens += num_accepted + 1
        is_hit = num_accepted == count and generator.random() < acceptance
        is_ready = is_hit or generator.random() < caught
    found = tokens_per_pass_ahead(acceptance, num_candidates, caught)
    assert found == pytest.approx(num_tokens / num_rounds, rel=0.02)
    assert ready_share(acceptance, num_candidates, caught) == pytest.approx(num_ready / num_rounds, abs=0.02)


def test_tokens_per_call_is_the_closed_form() -> None:
    assert tokens_per_call(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert tokens_per_call(1.0, 5) == 6
    assert tokens_per_call(0.0, 5) == 1


def test_some_length_helps_if_tokens_are_accepted_more_often_than_they_cost() -> None:
    """Corollary 3.9: and then the gain is at least (1 + a) / (1 + c)."""
    for acceptance in (0.1, 0.5, 0.8, 0.95):
        for cost_ratio in (0.02, 0.1, 0.4, 0.9):
            length = best_length(acceptance, cost_ratio, 40)
            assert (length > 0) == (acceptance > cost_ratio)
            if length:
                bound = (1 + acceptance) / (1 + cost_ratio)
                assert wall_time_factor(acceptance, length, cost_ratio) >= bound - 1e-12


def test_a_cheaper_draft_goes_on_longer() -> None:
    thresholds = [stopping_threshold(t_draft, 1.0, 0.1) for t_draft in (0.01, 0.1, 0.5)]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[0] == pytest.approx(1.09 / 1.1)
