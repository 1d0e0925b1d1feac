"""How much a policy depends on the length that it begins with (Gautam et al. 2025, Table 2)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpreadResult:
    """Speed-ups over the target alone of one policy in one placement at one batch size.

    Attributes:
        family: the policy and its other options.
        first_lengths, ratios: draft tokens of the first round, and what each gave.
        mean, deviation, range: of the ratios. The lengths are all that are meant, so the deviation is that of
            a whole population; the range is the largest less the smallest.
        mean_to_fixed, deviation_to_fixed: in units of the mean of fixed-length decoding over the same
            lengths, as the paper has them; None where that was not measured.
    """

    family: str
    placement: str
    batch_size: int
    first_lengths: list[int]
    ratios: list[float]
    mean: float
    deviation: float
    range: float
    mean_to_fixed: float | None
    deviation_to_fixed: float | None


def spreads_of(
    ratios: Mapping[str, Mapping[int, float]], *, placement: str, batch_size: int
) -> list[SpreadResult]:
    """Of all policies that were measured with several first lengths, over the lengths that all of them had.

    Args:
        ratios: by family and first length.
    """
    several = {family: found for family, found in ratios.items() if len(found) > 1}
    if not several:
        return []
    lengths = sorted(set.intersection(*(set(found) for found in several.values())))
    if len(lengths) < 2:
        return []
    values = {family: [found[length] for length in lengths] for family, found in several.items()}
    fixed = statistics.mean(values["fixed"]) if "fixed" in values else None
    return [
        SpreadResult(
            family=family,
            placement=placement,
            batch_size=batch_size,
            first_lengths=lengths,
            ratios=found,
            mean=statistics.mean(found),
            deviation=statistics.pstdev(found),
            range=max(found) - min(found),
            mean_to_fixed=None if fixed is None else statistics.mean(found) / fixed,
            deviation_to_fixed=None if fixed is None else statistics.pstdev(found) / fixed,
        )
        for family, found in values.items()
    ]


def nearest_first_lengths(
    settings: Iterable[tuple[str, int | None]], num_draft_tokens: int
) -> dict[str, int | None]:
    """For each policy, of the first lengths that it was measured with, the one nearest to this.

    Args:
        settings: families and first lengths, of which a policy may have none.
    """
    lengths: dict[str, list[int | None]] = {}
    for family, length in settings:
        lengths.setdefault(family, []).append(length)
    return {
        family: min(found, key=lambda length: abs((length or 0) - num_draft_tokens))
        for family, found in lengths.items()
    }
