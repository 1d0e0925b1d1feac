"""Measures the costs of passes, on which policies and the work of a draft on its own rank depend.

The costs are frozen into the manifest: a restart reads them instead of measuring again, so that it repeats
the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdist.engine.device_clock import synchronized_ns
from specdist.engine.draft_ahead import DraftAhead
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner
from specdist.policies.costs import BRANCH_COUNTS, CostModel, Curve
from specdist.sampling.branch_estimates import draft_distributions, draft_features
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import SamplingSettings
from specdist.theory.rounds import RoundChooser

NUM_WARMUPS = 1
NUM_PASSES = 9
# Of a pair, where it is not learned: in work ahead that is the same in all rounds.
ASSUMED_ACCEPTANCE = 0.8
# A second context, at which a few passes are measured: at least this long, and longer than the first.
LONG_CONTEXT = 1024
NUM_LONG_PASSES = 3


def plan_ahead(
    costs: CostModel,
    *,
    num_rows: int,
    max_draft_tokens: int,
    num_branches: int | None,
    acceptance: float,
    num_groups: int = 1,
) -> DraftAhead:
    """The same work ahead in every round, with the most expected tokens per second when ``num_rows``
    sequences run and tokens are accepted with this probability; one token and the fewest branches where
    decoding alone is faster.

    The first token ahead stands for a next token, the others are candidates. ``num_branches`` None chooses
    their number by the costs. ``num_groups`` targets share the draft, each with so many sequences.
    """
    counts = BRANCH_COUNTS if num_branches is None else (num_branches,)
    chooser = RoundChooser(costs, max_draft_tokens=max_draft_tokens, branch_counts=counts)
    shape = chooser.always_ahead(num_rows, acceptance=acceptance, num_groups=num_groups)
    return DraftAhead(num_tokens=shape.num_ahead, num_branches=shape.num_branches)


def typical_context(lengths: Iterable[tuple[int, int]]) -> int:
    """Typical number of tokens before a pass: those of a prompt and of half a completion; 0 without prompts.

    ``lengths``: of each prompt, its tokens and the most tokens of a completion.
    """
    return int(statistics.median([prompt + longest // 2 for prompt, longest in lengths] or [0]))


def measure_curve(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int = 0,
) -> Curve:
    """Times of passes over up to ``num_rows * num_tokens_per_row`` tokens, each row after a context.

    All ranks of a sharded model must call it at the same time. It overwrites the cache.

    Args:
        finish: the work on a pass's logits, such as :func:`verify_logits`; its time counts.
    """
    # 1, 2, 4, ... and the largest.
    largest = num_rows * num_tokens_per_row
    sizes = [1 << power for power in range((largest - 1).bit_length())] + [largest]
    medians = _medians(
        NUM_PASSES,
        [partial(_pass_ns, runner, finish, min(size, num_rows), size, num_context_tokens) for size in sizes],
    )
    # A pass over fewer tokens cannot take longer than one over more: then it was disturbed.
    bounded = np.minimum.accumulate(medians[::-1])[::-1]
    return Curve(sizes, bounded.astype(int).tolist())


def _medians(num_passes: int, measures: Sequence[Callable[[], int]]) -> list[float]:
    """Of each measure. All in turn, several times: a temporary disturbance of the machine affects all."""
    times: list[list[int]] = [[] for _ in measures]
    for _ in range(NUM_WARMUPS + num_passes):
        for measure, found in zip(measures, times, strict=True):
            found.append(measure())
    return [statistics.median(found[NUM_WARMUPS:]) for found in times]


def context_slopes(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    *,
    num_rows: int,
    num_tokens_per_row: int,
    num_context_tokens: int,
    max_context_tokens: int,
) -> tuple[float, float]:
    """Nanoseconds that 1,000 more tokens of context add to a pass: for every row, and for every token.

    Measured between the context of the curves and a longer one, or a shorter one where none is possible; with
    one token per row and with several. All ranks of a sharded model must call it at the same time.
    """
    other = min(max(2 * num_context_tokens, LONG_CONTEXT), max_context_tokens)
    if other <= num_context_tokens:
        other = 0
    shapes = [(context, num_rows * per_row) for context in (num_context_tokens, other)
              for per_row in (1, num_tokens_per_row)]  # fmt: skip
    measures = [partial(_pass_ns, runner, finish, num_rows, size, context) for context, size in shapes]
    medians = np.array(_medians(NUM_LONG_PASSES, measures)).reshape(2, 2)
    if other == num_context_tokens:
        return 0.0, 0.0
    one, several = (medians[1] - medians[0]) / (other - num_context_tokens) * 1000 / num_rows
    per_token = 0.0
    if num_tokens_per_row > 1:
        per_token = min(max(0.0, (several - one) / (num_tokens_per_row - 1)), max(0.0, one))
    return max(0.0, float(one) - per_token), float(per_token)


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


def _pass_ns(
    runner: ModelRunner,
    finish: Callable[[Tensor], object],
    num_rows: int,
    num_tokens: int,
    num_context_tokens: int,
) -> int:
    """Nanoseconds of a pass over so many tokens, spread over the rows, until the device has finished. The
    contents of the cache do not matter."""
    lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
    batch = FlatBatch(
        np.zeros(num_tokens, np.int64),
        np.repeat(np.arange(num_rows), lengths),
        num_context_tokens + np.concatenate([np.arange(length) for length in lengths]),
    )
    begin_ns = synchronized_ns(runner.device)
    finish(runner.forward(batch, np.arange(len(batch))))
    return synchronized_ns(runner.device) - begin_ns
