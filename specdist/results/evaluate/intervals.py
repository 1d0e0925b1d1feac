"""Confidence intervals and paired tests: bootstrap and permutations over prompts.

Both draw how often each *distinct* result of a prompt occurs. The distribution is that of drawing prompts one
by one, but a million prompts that are right or wrong cost no more than ten.

P prompts, U distinct ones, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specdist.results.evaluate.scores import Metric

NUM_PERMUTATIONS = 10_000
# Rounding depends on the order of a sum: a permutation as extreme as the data must count.
TOLERANCE = 1e-9
# Numbers drawn at a time, which bounds the memory.
BLOCK = 2**22
BOOTSTRAP, EXACT = "percentile bootstrap", "Clopper-Pearson"


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a figure over all prompts of this kind.

    ``method``: the percentile bootstrap (Efron 1979) or, if all prompts have the same value and so all
    resamples are equal, the exact bound of Clopper and Pearson (1934).
    """

    low: float
    high: float
    method: str = BOOTSTRAP


@dataclass(frozen=True)
class PairedComparison:
    """``difference``: the first run minus the second, over the prompts of both.

    ``p_value``: two-sided, how often randomly swapping the runs of each prompt gives a difference as large.
    If all differences have the same size, as of right and wrong answers, it is exact: McNemar's test.
    """

    num_prompts: int
    first: float | None
    second: float | None
    difference: float | None
    interval: Interval | None
    num_better: int
    num_worse: int
    p_value: float
    test: str


def bootstrap_interval(
    metric: Metric, *, confidence: float, num_resamples: int, seed: int
) -> Interval | None:
    """None if the figure has no value, or if all prompts have the same value and its range is unknown."""
    if metric.value is None:
        return None
    values_P = _values(metric)
    if np.ptp(values_P) == 0:
        return _interval_of_equals(values_P, 0.0, confidence) if _are_shares(values_P) else None
    parts_UX, counts_U = _distinct(np.stack([metric.numerators_P, metric.denominators_P], axis=1))
    rng = np.random.default_rng(seed)
    sums = np.concatenate([draws @ parts_UX for draws in _resamples(rng, counts_U, num_resamples)])
    return _percentiles(_ratio(sums[:, 0], sums[:, 1]), confidence)


def compare_paired(
    first: Metric, second: Metric, *, confidence: float, num_resamples: int, seed: int
) -> PairedComparison:
    """Compare two runs' figures of the same prompts in the same order."""
    parts = [first.numerators_P, first.denominators_P, second.numerators_P, second.denominators_P]
    parts_UX, counts_U = _distinct(np.stack(parts, axis=1))
    rng = np.random.default_rng(seed)
    interval = None
    difference = None
    if first.value is not None and second.value is not None:
        difference = first.value - second.value
        sums = np.concatenate([draws @ parts_UX for draws in _resamples(rng, counts_U, num_resamples)])
        interval = _percentiles(_ratio(sums[:, 0], sums[:, 1]) - _ratio(sums[:, 2], sums[:, 3]), confidence)
    gains_P = _ratio(parts[0], parts[1]) - _ratio(parts[2], parts[3])
    if (
        interval is not None
        and np.ptp(gains_P) == 0
        and bool((parts[1] == parts[3]).all())
        and _are_shares(_values(first), _values(second))
    ):
        interval = _interval_of_equals(gains_P, -1.0, confidence)
    num_better, num_worse = int((gains_P > 0).sum()), int((gains_P < 0).sum())
    is_exact = _differ_by_one_size(gains_P) and bool((parts[1] == parts[3]).all() and np.ptp(parts[1]) == 0)
    if is_exact:
        p_value, test = sign_test(num_better, num_worse), "exact sign test (McNemar)"
    else:
        p_value, test = _permutation_test(parts_UX, counts_U, rng), f"{NUM_PERMUTATIONS:,} permutations"
    return PairedComparison(
        num_prompts=len(parts[0]),
        first=first.value,
        second=second.value,
        difference=difference,
        interval=interval,
        num_better=num_better,
        num_worse=num_worse,
        p_value=p_value,
        test=test,
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """The two-sided exact p-value of McNemar's test: discordant pairs fall either way like a fair coin."""
    total, fewer = num_better + num_worse, min(num_better, num_worse)
    tail = term = 1
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, float(2 * tail / 2**total))


def _values(metric: Metric) -> np.ndarray:
    """The values of all prompts that have one."""
    has_value_P = metric.denominators_P != 0
    return metric.numerators_P[has_value_P] / metric.denominators_P[has_value_P]


def _are_shares(*values: np.ndarray) -> bool:
    """Whether all values are in [0, 1], as those of right and wrong answers or shares."""
    return all(bool(((values_P >= 0) & (values_P <= 1)).all()) for values_P in values)


def _interval_of_equals(values_P: np.ndarray, least: float, confidence: float) -> Interval:
    """The interval of the mean of values from ``least`` to 1, when all that were seen are equal.

    None of P prompts has another value, so at most a share ``1 - (alpha / 2)^(1/P)`` of all prompts has
    (Clopper and Pearson's bound for 0 of P); these values may lie anywhere in the range.
    """
    value, num_prompts = float(values_P[0]), len(values_P)
    others = 1 - ((1 - confidence) / 2) ** (1 / num_prompts)
    return Interval(value - others * (value - least), value + others * (1 - value), EXACT)


def _permutation_test(parts_UX: np.ndarray, counts_U: np.ndarray, rng: np.random.Generator) -> float:
    """The p-value. Swapping a prompt's two results moves its parts from one sum to the other."""
    swap_UX = parts_UX[:, [2, 3, 0, 1]] - parts_UX
    totals_X = counts_U @ parts_UX
    observed = _difference(totals_X[None])[0]
    if not np.isfinite(observed):
        return 1.0
    num_extreme = 0
    for draws_RU in _blocks(NUM_PERMUTATIONS, len(counts_U)):
        swapped_RU = rng.binomial(counts_U, 0.5, size=(draws_RU, len(counts_U)))
        differences_R = _difference(totals_X + swapped_RU @ swap_UX)
        num_extreme += int((np.abs(differences_R) >= abs(observed) * (1 - TOLERANCE)).sum())
    return (1 + num_extreme) / (1 + NUM_PERMUTATIONS)


def _difference(sums_RX: np.ndarray) -> np.ndarray:
    return _ratio(sums_RX[:, 0], sums_RX[:, 1]) - _ratio(sums_RX[:, 2], sums_RX[:, 3])


def _differ_by_one_size(gains_P: np.ndarray) -> bool:
    sizes = np.abs(gains_P[gains_P != 0])
    return bool(np.isfinite(sizes).all()) and (len(sizes) == 0 or bool(np.ptp(sizes) <= TOLERANCE))


def _distinct(parts_PX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(parts_PX, axis=0, return_counts=True)


def _resamples(rng: np.random.Generator, counts_U: np.ndarray, num_resamples: int) -> Iterator[np.ndarray]:
    """How often each distinct prompt is drawn, in blocks of [R, U]."""
    total = int(counts_U.sum())
    for size in _blocks(num_resamples, len(counts_U)):
        yield rng.multinomial(total, counts_U / total, size=size)


def _blocks(num: int, width: int) -> list[int]:
    size = max(1, BLOCK // max(1, width))
    return [min(size, num - start) for start in range(0, num, size)]


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """NaN for a denominator of 0."""
    return np.divide(numerators, denominators, out=np.full(numerators.shape, np.nan), where=denominators != 0)


def _percentiles(values_R: np.ndarray, confidence: float) -> Interval:
    outside = (1 - confidence) / 2
    low, high = np.nanquantile(values_R, [outside, 1 - outside])
    return Interval(float(low), float(high))
