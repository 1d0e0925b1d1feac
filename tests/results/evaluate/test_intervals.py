"""Confidence intervals and tests against theory and brute force; every draw is seeded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from specdist.results.evaluate.intervals import bootstrap_interval, compare_paired, sign_test
from specdist.results.evaluate.scores import Groups, Metric

OPTIONS = {"confidence": 0.95, "num_resamples": 4000, "seed": 1}


def test_the_interval_of_a_share_agrees_with_its_standard_error() -> None:
    """Of 400 prompts, 30% right: 0.3 ± 1.96 sqrt(0.3 · 0.7 / 400); the bootstrap adds less than 0.005."""
    metric = Metric.mean(np.repeat([1.0, 0.0], [120, 280]))
    found = bootstrap_interval(metric, **OPTIONS)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([0.3 - half, 0.3 + half], abs=0.006)


def test_the_interval_covers_the_mean_as_often_as_it_claims() -> None:
    """Of 300 intervals of 90%, 251 to 287 cover the known mean in 999 of 1,000 cases."""
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        found = bootstrap_interval(
            Metric.mean(rng.normal(2.0, 1.0, 80)), confidence=0.9, num_resamples=400, seed=seed
        )
        assert found is not None
        covered += found.low <= 2.0 <= found.high
    assert 251 <= covered <= 287


def test_samples_of_one_prompt_are_not_independent_evidence() -> None:
    """Eight equal samples of each prompt leave the interval that one of each has."""
    answers = np.repeat([1.0, 0.0], [20, 30])
    once = Groups.of(list(range(50))).mean(answers)
    often = Groups.of(list(np.repeat(range(50), 8))).mean(np.repeat(answers, 8))
    assert bootstrap_interval(once, **OPTIONS) == bootstrap_interval(often, **OPTIONS)


def test_a_ratio_is_a_ratio_of_sums() -> None:
    """Log-likelihood per token: long completions weigh more, and prompts without tokens nothing."""
    metric = Metric(np.array([-2.0, -30.0, 0.0]), np.array([1.0, 10.0, 0.0]))
    assert metric.value == -32 / 11
    nothing = Metric(np.zeros(2), np.zeros(2))
    assert nothing.value is None and bootstrap_interval(nothing, **OPTIONS) is None
    found = compare_paired(nothing, nothing, **OPTIONS)
    assert (found.difference, found.interval, found.p_value) == (None, None, 1.0)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 1), (8, 8), (3, 12)])
def test_the_sign_test_is_that_of_a_fair_coin(better, worse) -> None:
    total = better + worse
    far = abs(better - worse)
    outcomes = [abs(2 * sum(coins) - total) >= far for coins in itertools.product((0, 1), repeat=total)]
    assert sign_test(better, worse) == pytest.approx(sum(outcomes) / len(outcomes))


def test_right_and_wrong_answers_are_compared_by_the_exact_test() -> None:
    first, second = np.array([1.0, 1, 1, 1, 1, 0, 0]), np.array([0.0, 0, 0, 0, 0, 0, 1])
    found = compare_paired(Metric.mean(first), Metric.mean(second), **OPTIONS)
    assert (found.num_better, found.num_worse, found.test) == (5, 1, "exact sign test (McNemar)")
    assert found.p_value == pytest.approx(2 * (1 + 6) / 64)
    assert found.difference == pytest.approx(4 / 7)


@pytest.mark.parametrize("has_weights", [False, True])
def test_the_permutation_test_agrees_with_enumerating_all_swaps(has_weights) -> None:
    """Against all 2^10 swaps; the spread of 10,000 draws is below 0.005."""
    rng = np.random.default_rng(3)
    weights = rng.integers(1, 9, (2, 10)).astype(float) if has_weights else np.ones((2, 10))
    sums = rng.normal(0.0, 1.0, (2, 10)) * weights
    sums[0] += 0.4 * weights[0]
    runs = [Metric(sums[index], weights[index]) for index in (0, 1)]
    found = compare_paired(*runs, **OPTIONS)
    assert found.difference is not None and found.test == "10,000 permutations"
    num_extreme = 0
    for swaps in itertools.product((False, True), repeat=10):
        one = Metric(np.where(swaps, sums[1], sums[0]), np.where(swaps, weights[1], weights[0]))
        two = Metric(np.where(swaps, sums[0], sums[1]), np.where(swaps, weights[0], weights[1]))
        num_extreme += abs(one.value - two.value) >= abs(found.difference) * (1 - 1e-9)
    assert 0.02 < found.p_value < 0.9
    assert found.p_value == pytest.approx(num_extreme / 2**10, abs=0.02)


def test_the_paired_interval_is_narrower_than_its_parts() -> None:
    """Two runs that are right on the same prompts, with few exceptions."""
    rng = np.random.default_rng(5)
    first = (rng.random(500) < 0.5).astype(float)
    second = first.copy()
    second[:10] = 1 - second[:10]
    found = compare_paired(Metric.mean(first), Metric.mean(second), **OPTIONS)
    alone = bootstrap_interval(Metric.mean(first), **OPTIONS)
    assert found.interval is not None and alone is not None
    assert found.interval.high - found.interval.low < 0.4 * (alone.high - alone.low)
    same = compare_paired(Metric.mean(first), Metric.mean(first), **OPTIONS)
    assert (same.difference, same.p_value, same.num_better) == (0.0, 1.0, 0)


def test_none_or_all_right_has_the_interval_of_clopper_and_pearson() -> None:
    """For 16 prompts, to the three decimals of published tables; all their resamples are equal."""
    for value, low, high in ((0.0, 0.0, 0.206), (1.0, 0.794, 1.0)):
        found = bootstrap_interval(Metric.mean(np.full(16, value)), **OPTIONS)
        assert found is not None and found.method == "Clopper-Pearson"
        assert [found.low, found.high] == pytest.approx([low, high], abs=5e-4)
    # The same share of every prompt, between 0 and 1: the few prompts that may differ can have any share.
    half = bootstrap_interval(Metric.mean(np.full(16, 0.5)), **OPTIONS)
    assert half is not None and [half.low, half.high] == pytest.approx([0.397, 0.603], abs=5e-4)


def test_the_interval_at_the_edge_covers_as_often_as_it_claims() -> None:
    """Exactly: of 16 prompts that are right with chance p, none is with chance (1 - p)^16. The interval then
    misses p only above 0.206, where that happens in fewer than 2.5% of all data sets."""
    found = bootstrap_interval(Metric.mean(np.zeros(16)), **OPTIONS)
    assert found is not None
    assert (1 - found.high) ** 16 == pytest.approx(0.025)


def test_samples_of_a_prompt_do_not_narrow_the_interval_at_the_edge() -> None:
    groups = Groups.of(list(np.repeat(range(16), 8)))
    found = bootstrap_interval(groups.mean(np.zeros(128)), **OPTIONS)
    assert found == bootstrap_interval(Metric.mean(np.zeros(16)), **OPTIONS)


def test_equal_values_of_no_known_range_have_no_interval() -> None:
    for metric in (Metric(np.full(4, -6.0), np.full(4, 3.0)), Metric.mean(np.array([2.5]))):
        assert bootstrap_interval(metric, **OPTIONS) is None
    one = bootstrap_interval(Metric.mean(np.array([1.0])), **OPTIONS)
    assert one is not None and [one.low, one.high] == pytest.approx([0.025, 1.0])


def test_runs_that_never_differ_may_differ_on_other_prompts() -> None:
    mixed = Metric.mean(np.repeat([1.0, 0.0], 8))
    same = compare_paired(mixed, mixed, **OPTIONS)
    assert same.interval is not None and same.interval.method == "Clopper-Pearson"
    assert [same.interval.low, same.interval.high] == pytest.approx([-0.206, 0.206], abs=5e-4)
    ones, zeros = Metric.mean(np.ones(16)), Metric.mean(np.zeros(16))
    apart = compare_paired(ones, zeros, **OPTIONS)
    assert apart.interval is not None
    assert [apart.interval.low, apart.interval.high] == pytest.approx([1 - 2 * 0.206, 1.0], abs=1e-3)
    likelihoods = Metric(np.array([-2.0, -30.0]), np.array([1.0, 10.0]))
    equal = compare_paired(likelihoods, likelihoods, **OPTIONS).interval
    assert equal is not None and (equal.low, equal.high) == (0.0, 0.0)
