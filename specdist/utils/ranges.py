"""Ranges side by side: of arrays without a loop, and of parts of given sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def arange_segments(lengths_S: np.ndarray) -> np.ndarray:
    """0, 1, .., n-1 for every segment of n tokens, one after the other."""
    ends_S = lengths_S.cumsum()
    return np.arange(ends_S[-1] if len(ends_S) else 0) - (ends_S - lengths_S).repeat(lengths_S)


def ranges_from(begins_S: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
    """begin, begin + 1, .. for every segment of n tokens, one after the other."""
    ends_S = lengths_S.cumsum()
    offsets_S = begins_S - ends_S + lengths_S
    return np.arange(ends_S[-1] if len(ends_S) else 0) + offsets_S.repeat(lengths_S)


def places_from(
    slots_R: np.ndarray, begins_R: np.ndarray, lengths_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of each of ``lengths`` tokens from ``begins`` on: an index by both."""
    return slots_R.repeat(lengths_R), ranges_from(begins_R, lengths_R)


def range_of_part(sizes: Sequence[int], index: int, begin: int = 0) -> range:
    """The places of a part, of parts of these sizes one after the other from ``begin`` on."""
    start = begin + sum(sizes[:index])
    return range(start, start + sizes[index])
