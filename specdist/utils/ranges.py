"""Ranges side by side, without a loop."""

from __future__ import annotations

import numpy as np


def arange_segments(lengths_S: np.ndarray) -> np.ndarray:
    """0, 1, .., n-1 for every segment of n tokens, one after the other."""
    starts_S = np.cumsum(lengths_S) - lengths_S
    return np.arange(lengths_S.sum()) - np.repeat(starts_S, lengths_S)
