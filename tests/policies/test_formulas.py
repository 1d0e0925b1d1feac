"""The formulas against simulation, and against each other."""

import numpy as np
import pytest

from specdist.policies.formulas import asynchronous_round, ready_share, tokens_per_call


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
    found = asynchronous_round(acceptance, num_candidates, caught, 0).num_tokens
    assert found == pytest.approx(num_tokens / num_rounds, rel=0.02)
    assert ready_share(acceptance, num_candidates, caught) == pytest.approx(num_ready / num_rounds, abs=0.02)


def test_tokens_per_call_is_the_closed_form() -> None:
    assert tokens_per_call(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert tokens_per_call(1.0, 5) == 6
    assert tokens_per_call(0.0, 5) == 1
