"""Times of passes of all sizes, whatever they take, as tests measure them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdist.job.costs.pass_times import PassTimer, PassTimes, always
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import Curve


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
        tolerance=0.0,
        prepares=timer.is_asynchronous,
    )
    return times.timed(always).curve()
