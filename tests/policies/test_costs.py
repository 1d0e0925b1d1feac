"""Cost curves: between the measured sizes, beyond them, and looked up."""

import json

import numpy as np
import pytest

from specdist.policies.costs import ContextCosts, CostModel, Curve

CURVE = Curve([1, 4, 8], [10, 40, 60])


@pytest.mark.parametrize(("size", "ns"), [(0, 0), (1, 10), (2.5, 25), (8, 60), (10, 70)])
def test_it_is_straight_between_points_and_on_with_the_last_slope(size: float, ns: float) -> None:
    assert float(CURVE(size)) == ns


def test_time_does_not_fall_beyond_the_points() -> None:
    assert float(Curve([1, 4], [10, 5])(8)) == 5


@pytest.mark.parametrize("curve", [CURVE, Curve([3], [7])])
def test_what_is_looked_up_is_what_is_worked_out(curve: Curve) -> None:
    for counts in (np.arange(5), np.array([[100, 0], [7, 9]]), np.zeros(0, np.int64)):
        np.testing.assert_array_equal(curve.look_up(counts), curve(counts))
    assert all(curve.look_up(count) == curve(count) for count in (0, 3, 100))


@pytest.mark.parametrize("context", [ContextCosts(), ContextCosts(1000, 4, 700.0, 30.0, 500.0)])
def test_one_pass_costs_what_it_costs_among_others(context: ContextCosts) -> None:
    costs = CostModel(CURVE, Curve([1, 2], [2, 7]), context)
    for count in (0, 1, 3, 100):
        for length in (1.0, 999.0, 4096.5):
            assert costs.target_ns(count, 2, length) == costs.target_ns(np.array([count]), 2, length)[0]
            assert costs.draft_ns(count, length) == costs.draft_ns(np.array([count]), length)[0]


def test_costs_survive_the_manifest() -> None:
    costs = CostModel(CURVE, Curve([1], [2]))
    assert CostModel.from_json(json.loads(json.dumps(costs.to_json()))) == costs
