"""Theory against measurement: figures computed by hand, and independent coins for which the formulas hold."""

import json
import random

import pytest

from specdist.data.stats.shard import AheadOutcome, Stats
from specdist.job.totals.predictions import Comparison, predictions_of
from specdist.policies.costs import CostModel, Curve

NUM_ROUNDS = 40_000


def synchronous_stats() -> Stats:
    """Blocks of 3, 3, 2 and 0 candidates, of which 3, 1 and 0 were kept: four of six verified ones."""
    stats = Stats(num_completion_tokens=8, num_misses=2, wall_ns=200)
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    stats.observe_draft_passes([4, 2, 4, 4])
    stats.observe_target_pass(num_tokens=5, time_ns=60)
    stats.observe_target_pass(num_tokens=5, time_ns=50)
    stats.observe_target_pass(num_tokens=20, time_ns=190)
    stats.target_ns.prefill, stats.target_ns.verify, stats.target_ns.idle = 10, 100, 70
    stats.draft_ns.draft, stats.draft_ns.prefill = 60, 5
    return stats


def test_the_formulas_by_hand() -> None:
    found = predictions_of(synchronous_stats(), None)
    assert found.acceptance == pytest.approx(2 / 3)
    assert found.cost_ratio == pytest.approx((60 / 4) / (100 / 3))
    # 1.67 / 1.45 for one token, 2.11 / 1.9 for two.
    assert found.best_num_draft_tokens == 1
    # 1 + a + a² + a³ = 65/27 twice, 1 + a + a² = 57/27, and 1.
    tokens = (2 * 65 + 57 + 27) / 27
    expected = {
        "tokens_per_row_pass": (tokens / 4, 8 / 4),
        "draft_acceptance_rate": ((tokens - 4) / 8, 4 / 8),
        "verification_rate": (4 / tokens, 4 / 8),
        "discard_rate": ((8 - (tokens - 4)) / tokens, 4 / 8),
        # Draft steps take 0.6 of the target's time; of the wall clock, 10 and 5 went into prompts.
        "wall_time_factor": (tokens / 4 / 1.6, 2 * 100 / 185),
    }
    assert set(found.theory) == set(expected)
    for name, (predicted, measured) in expected.items():
        figure = found.theory[name]
        assert (figure.predicted, figure.measured) == pytest.approx((predicted, measured)), name
        assert figure.ratio == pytest.approx(measured / predicted)
    assert not found.drift and found.target_share_in_curve is None


def test_a_draft_of_its_own_runs_prompts_beside_the_target() -> None:
    stats = synchronous_stats()
    stats.num_messages = 1
    assert predictions_of(stats, None).theory["wall_time_factor"].measured == pytest.approx(2 * 100 / 190)


def test_drift_by_hand() -> None:
    # 10 ns a token, measured for up to 10 tokens, and 2 ns a row.
    costs = CostModel(target=Curve([1, 10], [10, 100]), draft=Curve([1, 4], [2, 8]))
    stats = synchronous_stats()
    found = predictions_of(stats, costs)
    drift = {
        name: (figure.predicted, figure.measured)
        for name, figure in found.drift.items()
        if figure.predicted is not None and figure.measured is not None
    }
    assert drift == {
        "target_pass_s": pytest.approx((50e-9, 55e-9)),
        "draft_step_s": pytest.approx((28e-9 / 4, 60e-9 / 4)),
        "rounds_s": pytest.approx((328e-9, 360e-9)),
    }
    assert found.target_share_in_curve == pytest.approx(110 / 300)
    # Ahead a round takes the longer of the two, and the target's waiting is in the time of rounds.
    stats.num_ahead_chains = 1
    rounds = predictions_of(stats, costs).drift["rounds_s"]
    assert (rounds.predicted, rounds.measured) == pytest.approx((300e-9, 370e-9))


def test_asynchronous_work_by_hand() -> None:
    """Three chains of four after blocks of 3, 1 and 0; the last one hits."""
    stats = Stats(num_completion_tokens=6)
    for drafted, accepted in ((3, 3), (1, 0), (0, 0)):
        stats.observe_block(num_drafted=drafted, num_accepted=accepted)
    for is_hit, is_reached in ((False, True), (False, False), (True, True)):
        outcome = AheadOutcome(4, is_hit, 2, num_lost_branch_tokens=5, branch_rank=0)
        stats.observe_ahead(outcome, is_reached=is_reached, is_miss=not is_hit)
    stats.draft_ns.draft, stats.target_ns.verify, stats.wall_ns = 30, 40, 50
    found = predictions_of(stats, None)
    a = found.acceptance
    assert a == pytest.approx(4 / 6)
    tokens = (1 + a + a**2 + a**3) + (1 + a) + 1
    hits = a**4 + a**2 + a
    discarded = 4 - (tokens - 3) + 15 + (3 - hits) * 4
    assert found.theory["discard_rate"].predicted == pytest.approx(discarded / tokens)
    assert found.theory["discard_rate"].measured == pytest.approx((1 + 8 + 15) / 6)
    assert found.theory["wall_time_factor"].predicted == pytest.approx(tokens / 3)
    # Two candidates on average where there are some: a³ and a of the rounds after those go on.
    ready = found.theory["ready_rate"]
    assert (ready.predicted, ready.measured) == pytest.approx((a / (1 - a**3 + a), 2 / 3))


def flip(generator: random.Random, acceptance: float, most: int) -> int:
    count = 0
    while count < most and generator.random() < acceptance:
        count += 1
    return count


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_independent_coins_do_what_theory_says(is_asynchronous: bool) -> None:
    """Figures of so many rounds have a spread of under 1%."""
    generator, stats = random.Random(5), Stats()
    num_drafted = 4
    for _ in range(NUM_ROUNDS):
        num_accepted = flip(generator, 0.7, num_drafted)
        stats.observe_block(num_drafted=num_drafted, num_accepted=num_accepted)
        stats.num_completion_tokens += num_accepted + 1
        was_full = num_accepted == num_drafted
        is_hit = is_asynchronous and was_full and generator.random() < 0.7
        missed = not is_hit and (is_asynchronous or not was_full)
        branch = int(is_asynchronous and missed and generator.random() < 0.4)
        outcome = AheadOutcome(5 * is_asynchronous, is_hit, 1, num_lost_branch_tokens=3, branch_rank=branch)
        stats.observe_ahead(outcome, is_reached=was_full, is_miss=missed)
        num_drafted = 4 if not is_asynchronous or is_hit or branch else 0
    found = predictions_of(stats, None)
    assert found.acceptance == pytest.approx(0.7, rel=0.01)
    assert ("ready_rate" in found.theory) == is_asynchronous
    for name, figure in found.theory.items():
        if name != "wall_time_factor":
            assert figure.ratio == pytest.approx(1, rel=0.02), name


def test_nothing_is_predicted_of_nothing() -> None:
    costs = CostModel(target=Curve([1, 10], [10, 100]), draft=Curve([1, 4], [2, 8]))
    found = predictions_of(Stats(), costs)
    assert found.acceptance is None and not found.theory
    assert all(figure.ratio is None for figure in found.drift.values())
    json.dumps(found.to_json())
    # A target alone.
    stats = Stats(num_completion_tokens=4)
    for _ in range(3):
        stats.observe_block(num_drafted=0, num_accepted=0)
    assert not predictions_of(stats, None).theory


def test_a_ratio_needs_both() -> None:
    assert Comparison(2.0, 3.0).ratio == 1.5
    assert Comparison(0.0, 3.0).ratio is None and Comparison(None, 3.0).ratio is None
    assert Comparison(2.0, None).ratio is None
