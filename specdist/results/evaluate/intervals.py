"""Confidence intervals and paired tests: bootstrap and permutations over prompts.

Both draw how often each *distinct* value occurs. The distribution is that of drawing prompts one by one, but
a million prompts that are right or wrong cost no more than ten. Every draw is seeded.

P prompts, U distinct values, R draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specdist.results.evaluate.scores import Metric

CONFIDENCE = 0.95
NUM_RESAMPLES, NUM_PERMUTATIONS = 2_000, 10_000
# Rounding depends on the order of a sum: a permutation as extreme as the data must count.
TOLERANCE = 1e-9
# Numbers drawn at a time, which bounds the memory.
BLOCK = 2**22


def bootstrap_interval(values_P: np.ndarray, least: float = 0.0) -> list[float] | None:
    """The interval of the mean of values from ``least`` to 1: the percentile bootstrap (Efron 1979).

    Where all values are equal, so are all resamples. Then at most a share ``1 - (alpha / 2)^(1/P)`` of all
    prompts has another value (the exact bound of Clopper and Pearson 1934 for 0 of P), which may lie anywhere
    in the range; None if the values show that this is not their range.
    """
    value, num_prompts, outside = float(values_P[0]), len(values_P), (1 - CONFIDENCE) / 2
    if np.ptp(values_P) == 0:
        others = 1 - outside ** (1 / num_prompts)
        bounds = [value - others * (value - least), value + others * (1 - value)]
        return bounds if least <= value <= 1 else None
    rng = np.random.default_rng(0)
    values_U, counts_U = np.unique(values_P, return_counts=True)

    def means(size: int) -> np.ndarray:
        drawn_RU = rng.multinomial(num_prompts, counts_U / num_prompts, size=size)
        return np.asarray(drawn_RU @ values_U / num_prompts)

    low, high = np.quantile(_drawn(means, NUM_RESAMPLES, len(values_U)), [outside, 1 - outside])
    return [float(low), float(high)]


def compare_paired(first: Metric, second: Metric) -> dict[str, Any] | None:
    """Compare the prompts that both runs have; None if there are none.

    ``difference``: the first run minus the second; ``p_value``: two-sided, how often randomly swapping the
    runs of each prompt gives a difference as large.
    """
    _, ours, theirs = np.intersect1d(first.prompt_ids_P, second.prompt_ids_P, return_indices=True)
    if not len(ours):
        return None
    ours_P, theirs_P = first.values_P[ours], second.values_P[theirs]
    gains_P = ours_P - theirs_P
    are_shares = all(bool(((values >= 0) & (values <= 1)).all()) for values in (ours_P, theirs_P))
    is_known = are_shares or np.ptp(gains_P) > 0
    return {
        "num_prompts": len(ours),
        "first": float(ours_P.mean()),
        "second": float(theirs_P.mean()),
        "difference": float(gains_P.mean()),
        "interval": bootstrap_interval(gains_P, least=-1.0) if is_known else None,
        "num_better": int((gains_P > 0).sum()),
        "num_worse": int((gains_P < 0).sum()),
        "p_value": _permutation_test(gains_P),
    }


def _permutation_test(gains_P: np.ndarray) -> float:
    """The p-value. Swapping a prompt's two results changes the sign of its gain."""
    rng = np.random.default_rng(0)
    gains_U, counts_U = np.unique(gains_P, return_counts=True)

    def sums(size: int) -> np.ndarray:
        swapped_RU = rng.binomial(counts_U, 0.5, size=(size, len(counts_U)))
        return np.asarray((counts_U - 2 * swapped_RU) @ gains_U)

    observed = abs(float(gains_P.sum())) * (1 - TOLERANCE)
    num_extreme = int((np.abs(_drawn(sums, NUM_PERMUTATIONS, len(gains_U))) >= observed).sum())
    return (1 + num_extreme) / (1 + NUM_PERMUTATIONS)


def _drawn(draw: Callable[[int], np.ndarray], num: int, width: int) -> np.ndarray:
    """``num`` results [R] of ``draw``, whose draws are ``width`` numbers wide."""
    size = max(1, BLOCK // width)
    return np.concatenate([draw(min(size, num - start)) for start in range(0, num, size)])
