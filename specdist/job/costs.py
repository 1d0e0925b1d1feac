"""What passes cost on this replica, measured once and frozen into the manifest; and what follows from it.

How far the draft works ahead, and how many branches it prepares, follows from these times: a restart reads
them from the manifest instead of measuring again, so that it repeats the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdist.engine.device_clock import synchronized_ns
from specdist.engine.proposals import DraftAhead
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies.costs import BRANCH_COUNTS, CostModel, Curve
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import SamplingSettings
from specdist.theory.formulas import caught_share, tokens_per_pass_ahead

NUM_WARMUPS = 1
NUM_PASSES = 9
# What is assumed of a pair of which nothing is known yet.
PRIOR_ACCEPTANCE = 0.8


def plan_ahead(
    costs: CostModel, *, num_rows: int, max_draft_tokens: int, num_branches: int | None
) -> DraftAhead:
    """The work ahead with the most expected tokens per second when ``num_rows`` rows are in flight.

    A round takes as long as the slower of the target's pass and the work beside it. The first token ahead
    becomes a next token, the others candidates; the first step is the chain's own, the branches join it in
    the others. ``num_branches`` None leaves them to the costs.
    """
    counts = BRANCH_COUNTS if num_branches is None else (num_branches,)
    plans = [
        DraftAhead(num_tokens=num_tokens, num_branches=count)
        for num_tokens in range(1, max_draft_tokens + 2)
        for count in counts
    ]
    target_ns = float(costs.target(num_rows * (max_draft_tokens + 1)))

    def tokens_per_ns(plan: DraftAhead) -> float:
        wide_ns = float(costs.draft(num_rows * (1 + plan.num_branches)))
        drafting_ns = float(costs.draft(num_rows)) + (plan.num_tokens - 1) * wide_ns
        caught = caught_share(plan.num_branches)
        num_tokens = tokens_per_pass_ahead(PRIOR_ACCEPTANCE, plan.num_tokens - 1, caught)
        return num_tokens / max(1.0, target_ns, drafting_ns)

    return max(plans, key=tokens_per_ns)


def middle_of_rows(lengths: Iterable[tuple[int, int]]) -> int:
    """About how many tokens stand before a pass: a prompt, and half of the longest completion that it may
    have. ``lengths`` are those two of each row; 0 without any row."""
    return int(statistics.median([prompt + longest // 2 for prompt, longest in lengths] or [0]))


def measure_curve(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int = 0,
) -> Curve:
    """Times of passes of up to so many tokens for each of up to so many rows, after so long a context.

    Every rank of a sharded model must call it at the same time. It overwrites the cache.

    Args:
        finish: what is done with a pass's logits, such as :func:`verify_logits`; it belongs to the pass.
    """
    sizes = _doubling(num_rows * num_tokens_per_row)
    times: list[list[int]] = [[] for _ in sizes]
    # Size after size, and again: what disturbs the machine for a while meets all of them.
    for _ in range(NUM_WARMUPS + NUM_PASSES):
        for size, found in zip(sizes, times, strict=True):
            found.append(_pass_ns(runner, finish, min(size, num_rows), size, num_context_tokens))
    medians = [statistics.median(found[NUM_WARMUPS:]) for found in times]
    # A pass of more tokens does all that one of fewer does, and more: a time above its is a disturbance.
    bounded = np.minimum.accumulate(medians[::-1])[::-1]
    return Curve(sizes, bounded.astype(int).tolist())


def target_curve(runner: ModelRunner, settings: SamplingSettings, vocab_size: int, **sizes: int) -> Curve:
    """Times of the target's passes; ``sizes`` are those of :func:`measure_curve`."""
    return measure_curve(runner, partial(verify_logits, settings=settings, vocab_size=vocab_size), **sizes)


def draft_curve(
    runner: ModelRunner, settings: SamplingSettings, vocab_size: int, *, uses_features: bool, **sizes: int
) -> Curve:
    """Times of the draft's steps; ``sizes`` are those of :func:`measure_curve`."""
    draw = partial(draw_from_logits, settings=settings, vocab_size=vocab_size, uses_features=uses_features)
    return measure_curve(runner, draw, **sizes)


def verify_logits(logits_NV: Tensor, *, settings: SamplingSettings, vocab_size: int) -> Tensor:
    """What the target does with its logits, as far as it takes time."""
    logits_NV = logits_NV[:, :vocab_size]
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    distributions = next_token_distributions(logits_NV, settings, zeros_N, zeros_N)
    return distributions.probabilities_of(zeros_N.to(distributions.device)).cpu()


def draw_from_logits(
    logits_NV: Tensor, *, settings: SamplingSettings, vocab_size: int, uses_features: bool
) -> Tensor:
    """What the draft does with its logits, as far as it takes time."""
    logits_NV = logits_NV[:, :vocab_size]
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    distributions, _, undecided = draft_distributions(logits_NV, settings, zeros_N, zeros_N)
    uniforms_N = zeros_N.double().to(distributions.device) if settings.is_random else None
    drawn_N = distributions.draw(uniforms_N).clamp(min=0)
    if uses_features:
        draft_features(logits_NV, undecided, drawn_N, settings).cpu()
    return drawn_N.cpu()


def _doubling(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return [1 << power for power in range((largest - 1).bit_length())] + [largest]


def _pass_ns(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    num_rows: int,
    num_tokens: int,
    num_context_tokens: int,
) -> int:
    """Time of a pass of so many tokens, spread over the rows, until the device has done it; what the cache
    holds there does not matter."""
    lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
    batch = FlatBatch(
        np.zeros(num_tokens, np.int64),
        np.repeat(np.arange(num_rows), lengths),
        num_context_tokens + np.concatenate([np.arange(length) for length in lengths]),
    )
    begin_ns = synchronized_ns(runner.device)
    finish(runner.forward(batch, np.arange(len(batch))))
    return synchronized_ns(runner.device) - begin_ns
