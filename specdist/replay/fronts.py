"""Pareto fronts of verification rate against discard rate (SpecDec++, Huang et al. 2024, section 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A verification rate and a discard rate.
Point = tuple[float, float]
NUM_COMPARED = 64


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other is at or below in both coordinates, from left to right."""
    front: list[Point] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def relative_waste(points: Sequence[Point], reference: Sequence[Point]) -> float | None:
    """How much the one front discards over what the other does, where they verify as often.

    Between its points a front is a straight line: a mixture of two settings. None if the two have no
    verification rate in common, or nothing is discarded there.
    """
    verified, discarded = np.array(pareto_front(points)).T
    verified_there, discarded_there = np.array(pareto_front(reference)).T
    begin, end = max(verified[0], verified_there[0]), min(verified[-1], verified_there[-1])
    if begin > end:
        return None
    rates = np.linspace(begin, end, NUM_COMPARED)
    there = float(np.interp(rates, verified_there, discarded_there).sum())
    return float(np.interp(rates, verified, discarded).sum()) / there if there else None
