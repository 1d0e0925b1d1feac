"""The dependence on the first length, by hand."""

from __future__ import annotations

import pytest

from tests.lab.benchmark.choices import nearest_first_lengths
from tests.lab.benchmark.comparing import spreads_of

RATIOS = {
    "fixed": {1: 1.0, 4: 9.9, 5: 2.0, 8: 3.0},
    "gammatune": {1: 2.4, 5: 2.5, 8: 2.6},
    "hf_heuristic": {5: 2.0},
}


def test_mean_deviation_and_range_over_the_common_lengths() -> None:
    """Length 4 was tried with one policy only, and one policy with one length only."""
    fixed, gammatune = spreads_of(RATIOS, placement="separate", batch_size=2)
    assert (fixed.family, gammatune.family) == ("fixed", "gammatune")
    assert fixed.first_lengths == gammatune.first_lengths == [1, 5, 8]
    assert fixed.ratios == [1.0, 2.0, 3.0]
    assert (fixed.mean, fixed.range) == (2.0, 2.0)
    # The deviation of the whole population: sqrt((1 + 0 + 1) / 3), not (1 + 0 + 1) / 2.
    assert fixed.deviation == pytest.approx((2 / 3) ** 0.5)
    assert gammatune.deviation == pytest.approx((0.02 / 3) ** 0.5)
    assert gammatune.range == pytest.approx(0.2)
    assert (fixed.placement, fixed.batch_size) == ("separate", 2)


def test_in_units_of_the_mean_of_fixed_lengths() -> None:
    fixed, gammatune = spreads_of(RATIOS, placement="colocated", batch_size=1)
    assert fixed.mean_to_fixed == 1.0
    assert fixed.deviation_to_fixed == pytest.approx((2 / 3) ** 0.5 / 2)
    assert gammatune.mean_to_fixed == pytest.approx(1.25)
    [alone] = spreads_of({"gammatune": RATIOS["gammatune"]}, placement="colocated", batch_size=1)
    assert alone.mean_to_fixed is None and alone.deviation_to_fixed is None


def test_without_common_lengths_nothing_is_compared() -> None:
    assert spreads_of({"hf_heuristic": {5: 2.0}}, placement="colocated", batch_size=1) == []
    apart = {"fixed": {1: 1.0, 2: 1.0}, "gammatune": {2: 1.0, 3: 1.0}}
    assert spreads_of(apart, placement="colocated", batch_size=1) == []


def test_the_length_shown_is_the_nearest_to_the_default() -> None:
    settings = [("fixed", 1), ("fixed", 4), ("fixed", 8), ("svip", None), ("gammatune", 16)]
    assert nearest_first_lengths(settings, 5) == {"fixed": 4, "svip": None, "gammatune": 16}
