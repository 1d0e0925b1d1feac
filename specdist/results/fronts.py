"""Pareto fronts of verification rate against discard rate (SpecDec++, Huang et al. 2024, section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A verification rate and a discard rate.
Point = tuple[float, float]
NUM_COMPARED = 64


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point dominates (at most as large in both coordinates), from left to right."""
    front: list[Point] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def relative_waste(points: Sequence[Point], reference: Sequence[Point]) -> float | None:
    """Discards of one front relative to those of the other, at equal verification rates.

    Between its points a front is linear: a mixture of two settings. None if the fronts have no verification
    rate in common, or the reference discards nothing there.
    """
    verified, discarded = np.array(pareto_front(points)).T
    verified_reference, discarded_reference = np.array(pareto_front(reference)).T
    begin, end = max(verified[0], verified_reference[0]), min(verified[-1], verified_reference[-1])
    if begin > end:
        return None
    rates = np.linspace(begin, end, NUM_COMPARED)
    expected = float(np.interp(rates, verified_reference, discarded_reference).sum())
    return float(np.interp(rates, verified, discarded).sum()) / expected if expected else None
