"""Ranges side by side, without a loop."""

from __future__ import annotations

import numpy as np


def arange_segments(lengths_S: np.ndarray) -> np.ndarray:
    """0, 1, .., n-1 for every segment of n tokens, one after the other."""
    starts_S = np.cumsum(lengths_S) - lengths_S
    return np.arange(lengths_S.sum()) - np.repeat(starts_S, lengths_S)


def places_from(
    slots_R: np.ndarray, begins_R: np.ndarray, lengths_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of each of ``lengths`` tokens from ``begins`` on: an index by both."""
    return np.repeat(slots_R, lengths_R), np.repeat(begins_R, lengths_R) + arange_segments(lengths_R)
