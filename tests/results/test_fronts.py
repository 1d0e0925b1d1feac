"""Pareto fronts, and what lies between two of them."""

import pytest

from specdist.results.fronts import pareto_front, relative_waste


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(0.5, 1.0), (0.4, 2.0), (0.6, 1.0), (0.5, 3.0), (0.7, 0.1), (0.4, 2.0)]
    assert pareto_front(points) == [(0.4, 2.0), (0.5, 1.0), (0.7, 0.1)]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0.2, 2.0), (0.8, 0.5)], 0.5),
        # Half of the line, and a point above it that the front does not hold.
        ([(0.5, 1.25), (0.8, 0.5), (0.6, 3.0)], 0.5),
        ([(0.5, 2.5)], 1.0),
        ([(0.9, 0.1)], None),
    ],
)
def test_waste_is_compared_at_the_same_verification_rate(
    points: list[tuple[float, float]], expected: float | None
) -> None:
    """Against a front that discards 4 to 1 tokens at 0.2 to 0.8 passes per token."""
    reference = [(0.2, 4.0), (0.8, 1.0)]
    assert relative_waste(points, reference) == (expected and pytest.approx(expected))


def test_where_nothing_is_discarded_there_is_no_ratio() -> None:
    assert relative_waste([(0.2, 0.0)], [(0.2, 0.0)]) is None
