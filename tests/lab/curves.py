"""Times of passes of all sizes, whatever they take: what the instruments and the tests measure with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdist.job.costs.pass_times import PassTimer, PassTimes, always, draft_work, target_work
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import Curve
from specdist.sampling.distributions import SamplingSettings


def measure_curve(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int = 0,
) -> Curve:
    """Of passes over 1, 2, 4, ... and ``num_rows * num_tokens_per_row`` tokens."""
    timer = PassTimer(runner, finish)
    times = PassTimes(
        timer,
        num_rows=num_rows,
        largest=num_rows * num_tokens_per_row,
        num_context_tokens=num_context_tokens,
        prepares=timer.is_asynchronous,
    )
    return times.timed(always).curve()


def target_curve(runner: ModelRunner, settings: SamplingSettings, vocab_size: int, **sizes: int) -> Curve:
    """Of the target's passes; ``sizes`` are those of :func:`measure_curve`."""
    return measure_curve(runner, target_work(settings, vocab_size), **sizes)


def draft_curve(
    runner: ModelRunner, settings: SamplingSettings, vocab_size: int, *, uses_features: bool, **sizes: int
) -> Curve:
    """Of the draft's steps; ``sizes`` are those of :func:`measure_curve`."""
    return measure_curve(runner, draft_work(settings, vocab_size, uses_features=uses_features), **sizes)
