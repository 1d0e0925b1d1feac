"""Pearson's chi-square test."""

import torch
from torch import Tensor

MIN_EXPECTED = 5.0


def chi_square_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Odds of counts at least as far from the law. Cells expecting fewer than five are pooled."""
    expected = probabilities.double() * counts.sum()
    counts = counts.double()
    small = expected < MIN_EXPECTED
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if float(expected[-1]) == 0:
        assert float(counts[-1]) == 0, "a token without probability was emitted"
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))
