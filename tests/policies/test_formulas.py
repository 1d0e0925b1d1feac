"""The formulas against simulation, and against each other."""

import numpy as np
import pytest

from specdist.policies import DraftFeatures, DraftSequences, RoundContext, Sprinter
from specdist.policies.formulas import (
    asynchronous_round,
    ready_share,
    tokens_per_call,
)
from tests.job.sprinter_formulas import sprinter_run_length, sprinter_stopping_time


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


def simulated_runs(num_acceptable: int, rates: tuple[float, float], num_runs: int) -> np.ndarray:
    """How many draft steps the policy takes in each run, with a verifier that passes the first so many tokens
    with one chance and all others with another."""
    generator = np.random.default_rng(1)
    policy = Sprinter(max_draft_tokens=10**6, verifier_threshold=0.5)
    num_steps, active = np.zeros(num_runs, np.int64), np.arange(num_runs)
    for depth in range(10**6):
        features = None
        if depth:
            chance = rates[0] if depth <= num_acceptable else rates[1]
            features = DraftFeatures.of_head((generator.random(len(active)) < chance).astype(float))
        rows = DraftSequences(
            slots_R=active,
            draft_slots_R=active,
            histories_RH=np.zeros((len(active), 0)),
            num_drafted=depth,
            features=features,
            reach_R=np.ones(len(active)),
            round=RoundContext(num_rows=len(active), num_pass_tokens=0, is_asynchronous=False),
        )
        active = active[policy.wants_more(rows)]
        if not len(active):
            break
        num_steps[active] += 1
    return num_steps


@pytest.mark.parametrize("num_acceptable", [0, 1, 5, 12])
@pytest.mark.parametrize("rates", [(0.9, 0.2), (0.6, 0.5), (1.0, 0.1)])
def test_runs_of_a_verifier_are_as_long_as_sprinter_s_theorems_say(
    num_acceptable: int, rates: tuple[float, float]
) -> None:
    num_steps = simulated_runs(num_acceptable, rates, 20_000)
    known = {"num_acceptable": num_acceptable, "true_positive": rates[0], "false_positive": rates[1]}
    # Every run ends after the first token that is doubted, which the theorem's N does not count.
    assert (num_steps - 1).mean() == pytest.approx(sprinter_run_length(**known), rel=0.02, abs=0.02)
    assert 0.01 * num_steps.mean() == pytest.approx(sprinter_stopping_time(t_draft=0.01, **known), rel=0.02)
