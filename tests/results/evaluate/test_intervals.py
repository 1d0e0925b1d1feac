"""Confidence intervals against theory; every draw is seeded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdist.results.evaluate.scores import Metric, bootstrap_interval, compare_paired


def metric(values: np.ndarray) -> Metric:
    return Metric(np.arange(len(values)), values)


def test_the_interval_of_a_share_agrees_with_its_standard_error() -> None:
    """Of 400 prompts, 30% right: 0.3 ± 1.96 sqrt(0.3 · 0.7 / 400); the bootstrap adds less than 0.005."""
    found = bootstrap_interval(np.repeat([1.0, 0.0], [120, 280]))
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert found == pytest.approx((0.3 - half, 0.3 + half), abs=0.006)


def test_the_interval_covers_the_mean_as_often_as_it_claims() -> None:
    """Of 100 intervals of 95%, 86 to 100 cover the known mean in 998 of 1,000 cases."""
    rng = np.random.default_rng(0)
    found = [bootstrap_interval(rng.normal(2.0, 1.0, 80)) for _ in range(100)]
    assert 86 <= sum(low <= 2.0 <= high for low, high in found) < 100


def test_samples_of_one_prompt_are_not_independent_evidence() -> None:
    """Eight equal samples of each prompt leave the interval that one of each has."""
    answers = np.repeat([1.0, 0.0], [20, 30])
    once = Metric.of(range(50), answers)
    often = Metric.of(np.repeat(range(50), 8), np.repeat(answers, 8))
    assert once.value == often.value == 0.4 and len(often.values_P) == 50
    assert bootstrap_interval(once.values_P) == bootstrap_interval(often.values_P)


def test_none_or_all_right_has_the_interval_of_clopper_and_pearson() -> None:
    """For 16 prompts, to the three decimals of published tables; all their resamples are equal."""
    for value, low, high in ((0.0, 0.0, 0.206), (1.0, 0.794, 1.0), (0.5, 0.397, 0.603)):
        assert bootstrap_interval(np.full(16, value)) == pytest.approx((low, high), abs=5e-4)
    assert bootstrap_interval(np.ones(1)) == pytest.approx((0.025, 1.0))
    # The range is not known.
    assert bootstrap_interval(np.full(16, 2.5)) is None


def test_runs_that_never_differ_may_differ_on_other_prompts() -> None:
    mixed = metric(np.repeat([1.0, 0.0], 8))
    same = compare_paired(mixed, mixed)
    assert same is not None and (same["difference"], same["num_better"]) == (0.0, 0)
    assert same["interval"] == pytest.approx((-0.206, 0.206), abs=5e-4)
    apart = compare_paired(metric(np.ones(16)), metric(np.zeros(16)))
    assert apart is not None and apart["interval"] == pytest.approx((1 - 2 * 0.206, 1.0), abs=1e-3)
    lengths = compare_paired(metric(np.array([3.0, 9.0])), metric(np.array([3.0, 9.0])))
    assert lengths is not None and lengths["interval"] is None
