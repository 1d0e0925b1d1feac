"""Pearson's chi-square test."""

import torch
from torch import Tensor

MIN_EXPECTED = 5.0


def chi_square_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Odds of counts at least as far from the distribution. Cells expecting fewer than five are pooled."""
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


def chi_square_p_value_of_rows(counts_CV: Tensor, probabilities_CV: Tensor) -> float:
    """Of independent rows of counts, each with its own total, in one test; 0 where the impossible was seen.

    Cells expecting fewer than five are pooled in each row, and left out where together they expect
    fewer.
    """
    if int(counts_CV[probabilities_CV == 0].sum()):
        return 0.0
    statistic, degrees = 0.0, 0
    for counts_V, probabilities_V in zip(counts_CV.double(), probabilities_CV.double(), strict=True):
        expected_V = probabilities_V * counts_V.sum()
        small_V = expected_V < MIN_EXPECTED
        pooled = expected_V[small_V].sum()
        counts = torch.cat([counts_V[~small_V], counts_V[small_V].sum()[None]])
        expected = torch.cat([expected_V[~small_V], pooled[None]])
        if pooled < MIN_EXPECTED:
            # The others are then tested given that the token was one of them.
            counts, expected = counts[:-1], expected[:-1] * counts[:-1].sum() / expected[:-1].sum()
        if len(expected) > 1:
            statistic += float(((counts - expected) ** 2 / expected).sum())
            degrees += len(expected) - 1
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
