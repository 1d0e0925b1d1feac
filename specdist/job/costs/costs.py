"""Measures the costs of passes, on which policies and the work of a draft on its own rank depend.

The costs are frozen into the manifest: a restart reads them instead of measuring again, so that it repeats
the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdist.job.costs.pass_times import FEW, Fits, PassTimer, PassTimes, always
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import Curve
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import SamplingSettings

# A second context, at which a few passes are measured: at least this long, and longer than the first.
LONG_CONTEXT = 1024


def measure_curve(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int = 0,
) -> Curve:
    """Times of passes over 1, 2, 4, ... and ``num_rows * num_tokens_per_row`` tokens, whatever they take."""
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


def context_slopes(
    timer: Callable[[int, int, int], int],
    curve: Curve,
    fits: Fits,
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int,
    max_context_tokens: int,
) -> tuple[float, float]:
    """Nanoseconds that 1,000 more tokens of context add to a pass: for every row, and for every token; (0, 0)
    where that could not be measured.

    Measured between the context of the curve and a longer one, or a shorter one where none is possible; with
    one token per row and with a few.
    """
    other = min(max(2 * num_context_tokens, LONG_CONTEXT), max_context_tokens)
    if other <= num_context_tokens:
        other = 0
    several = num_rows * min(FEW, num_tokens_per_row)
    # Two sizes, which may take twice as long.
    if other == num_context_tokens or not fits(4 * float(curve(several))):
        return 0.0, 0.0
    times = PassTimes(timer, num_rows=num_rows, largest=several, num_context_tokens=other)
    times.time_first(fits)
    times.repeat(fits)
    sizes = np.array([num_rows, several])
    more_ns = (times.curve()(sizes) - curve(sizes)) / (other - num_context_tokens) * 1000 / num_rows
    of_one, of_several = more_ns.tolist()
    per_token = 0.0
    if several > num_rows:
        per_token = min(max(0.0, (of_several - of_one) / (several / num_rows - 1)), max(0.0, of_one))
    return max(0.0, of_one) - per_token, per_token


def target_curve(runner: ModelRunner, settings: SamplingSettings, vocab_size: int, **sizes: int) -> Curve:
    """Times of the target's passes; ``sizes`` are those of :func:`measure_curve`."""
    return measure_curve(runner, target_work(settings, vocab_size), **sizes)


def draft_curve(
    runner: ModelRunner, settings: SamplingSettings, vocab_size: int, *, uses_features: bool, **sizes: int
) -> Curve:
    """Times of the draft's steps; ``sizes`` are those of :func:`measure_curve`."""
    return measure_curve(runner, draft_work(settings, vocab_size, uses_features=uses_features), **sizes)


def target_work(settings: SamplingSettings, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """See :func:`verify_logits`."""
    return partial(verify_logits, settings=settings, vocab_size=vocab_size)


def draft_work(
    settings: SamplingSettings, vocab_size: int, *, uses_features: bool
) -> Callable[[Tensor], Tensor]:
    """See :func:`draw_from_logits`."""
    return partial(draw_from_logits, settings=settings, vocab_size=vocab_size, uses_features=uses_features)


def verify_logits(logits_NV: Tensor, *, settings: SamplingSettings, vocab_size: int) -> Tensor:
    """The target's work on its logits, as far as it takes time."""
    logits_NV = logits_NV[:, :vocab_size]
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    distributions = next_token_distributions(logits_NV, settings, zeros_N, zeros_N)
    return distributions.probabilities_of(zeros_N.to(distributions.device)).cpu()


def draw_from_logits(
    logits_NV: Tensor, *, settings: SamplingSettings, vocab_size: int, uses_features: bool
) -> Tensor:
    """The draft's work on its logits, as far as it takes time."""
    logits_NV = logits_NV[:, :vocab_size]
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    distributions, _, undecided = draft_distributions(logits_NV, settings, zeros_N, zeros_N)
    uniforms_N = zeros_N.double().to(distributions.device) if settings.is_random else None
    drawn_N = distributions.draw(uniforms_N).clamp(min=0)
    if uses_features:
        draft_features(logits_NV, undecided, drawn_N, settings).cpu()
    return drawn_N.cpu()
