"""What the placement of the draft and its work ahead bring: measured, and as the model of the plan has it."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.benchmark.drafts import DraftOrder
from specdist.stats import DraftTimes, Stats, TargetTimes
from specdist.theory import ready_share


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """One way of running the draft, by the statistics of the last repeat. A ratio of nothing is None.

    Attributes:
        ratio_to_separate: tokens/s over those of the draft on a rank of its own that works in turns with the
            target, at the same batch size.
        num_ahead_tokens, num_branches: what the draft does per row while the target verifies.
        tokens_per_row_pass: what a row gets from a target pass, with or without candidates.
        acceptance: the chance that a judged token is accepted, candidates and first tokens ahead alike.
        ready_share: of the row-rounds, those that found candidates.
        predicted_ready_share: by :func:`specdist.theory.ready_share`, for this acceptance and the measured
            share of misses caught. It takes rows without end; here a row begins without candidates, and near
            its end there is nothing to draft. None where nothing is drafted ahead.
        num_misses, num_hits_per_rank: decisions that dropped a chain, and those of them that found a branch,
            by the rank of its first token among the alternatives.
        target_idle_share, draft_idle_share: of each side's time, the other side's being waited for.
    """

    ratio_to_separate: float | None
    num_ahead_tokens: int
    num_branches: int
    tokens_per_row_pass: float | None
    acceptance: float | None
    ready_share: float | None
    predicted_ready_share: float | None
    num_misses: int
    num_hits_per_rank: list[int]
    miss_catch_rate: float | None
    target_idle_share: float | None
    draft_idle_share: float | None


def overlap_of(stats: Stats, order: DraftOrder, ratio_to_separate: float | None) -> OverlapResult:
    """Read it from a run's statistics."""
    acceptance = stats.judged_acceptance_rate
    caught = _ratio(sum(stats.num_branch_hits_per_rank), stats.num_misses)
    predicted = None
    if order.ahead.num_tokens and acceptance is not None:
        predicted = ready_share(acceptance, order.ahead.num_tokens - 1, caught or 0.0)
    return OverlapResult(
        ratio_to_separate=ratio_to_separate,
        num_ahead_tokens=order.ahead.num_tokens,
        num_branches=order.ahead.num_branches,
        tokens_per_row_pass=_ratio(stats.num_completion_tokens, stats.num_row_steps),
        acceptance=acceptance,
        ready_share=_ratio(stats.num_drafts, stats.num_row_steps),
        predicted_ready_share=predicted,
        num_misses=stats.num_misses,
        num_hits_per_rank=stats.num_branch_hits_per_rank,
        miss_catch_rate=caught,
        target_idle_share=_idle_share(stats.target_ns),
        draft_idle_share=_idle_share(stats.draft_ns),
    )


def _idle_share(times: TargetTimes | DraftTimes) -> float | None:
    return _ratio(times.idle, times.total)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
