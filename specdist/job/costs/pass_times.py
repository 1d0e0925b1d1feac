"""Times passes of a model, with the work on their logits, until a budget is spent: the most telling sizes
first, and few of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.engine.target.sharded_target import RANK_ZERO, Collectives
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner
from specdist.policies.costs import Curve
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.coupling import next_token_distributions
from specdist.sampling.distributions import SamplingSettings
from specdist.utils.ranges import arange_segments

# Passes of a size, of which the fastest counts; fewer where the budget ends.
NUM_PASSES = 7
# Tokens of every row in the second pass that is timed: more than in plain decoding, and few.
FEW = 4
# Whether something that takes so many nanoseconds may still be measured.
Fits = Callable[[float], bool]
NO_SHAPE = (0, 0, 0)
# A second context, at which a few passes are measured: at least this long, and longer than the first.
LONG_CONTEXT = 1024


class Budget:
    """Time for all that is measured, from now on."""

    def __init__(self, total_ns: float, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.total_ns = total_ns
        self._now_ns = now_ns
        self._began_ns = now_ns()

    @property
    def left_ns(self) -> float:
        return max(0.0, self.total_ns - self.spent_ns)

    @property
    def spent_ns(self) -> int:
        return self._now_ns() - self._began_ns

    def until(self, share: float) -> Fits:
        """Whether something ends before this share of the total is spent."""
        return lambda ns: self.spent_ns + ns <= share * self.total_ns


def _synchronized_ns(device: torch.device) -> int:
    """``time.perf_counter_ns`` after the device has done all queued work: a round never synchronises."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


class PassTimer:
    """Runs passes with the work that follows on their logits. The contents of the cache do not matter; they
    are overwritten.

    Of a sharded model rank 0 decides what is run: it calls the timer, and :meth:`close` at the end; the other
    ranks :meth:`follow`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        finish: Callable[[Tensor], object],
        group: dist.ProcessGroup | None = None,
        text_ids: Sequence[int] = (),
        *,
        goes_on: bool = False,
    ) -> None:
        """
        Args:
            goes_on: after passes of another timer, of a drafter that has kept what these gave.
            finish: the work on a pass's logits, such as :func:`verify_logits`; its time counts.
            group: the ranks that share the model; None for a whole model.
            text_ids: see :func:`tokens_of_text`; the same on all ranks.
        """
        self._runner = runner
        self._finish = finish
        self._text_ids = text_ids
        self._goes_on = goes_on
        self._collectives = None if group is None else Collectives(group)
        # Work is queued: the first pass of a size may compile it, or record it as a graph.
        self.is_asynchronous = runner.is_asynchronous

    def __call__(self, num_rows: int, num_tokens: int, num_context_tokens: int) -> int:
        """Nanoseconds of a pass over so many tokens, spread over the rows, until the device has finished."""
        self._tell((num_rows, num_tokens, num_context_tokens))
        return self._timed(partial(self._run, num_rows, num_tokens, num_context_tokens))

    def prompt_ns(self, num_tokens: int) -> int:
        """Nanoseconds of a pass over a sequence's first tokens, without logits, of a model that is whole."""
        tokens = tokens_of_text(self._text_ids, [num_tokens])
        batch = FlatBatch(tokens, np.zeros(num_tokens, np.int64), np.arange(num_tokens))
        self._runner.assume_contexts(np.zeros(1, np.int64), np.zeros(1, np.int64))
        return self._timed(partial(self._runner.forward, batch, []))

    def _timed(self, run: Callable[[], object]) -> int:
        begin_ns = _synchronized_ns(self._runner.device)
        run()
        return _synchronized_ns(self._runner.device) - begin_ns

    def close(self) -> None:
        """The other ranks need follow no more."""
        self._tell(NO_SHAPE)

    def follow(self) -> None:
        """Run the same passes on the other ranks of a sharded model."""
        assert self._collectives is not None
        zeros = torch.zeros(len(NO_SHAPE), dtype=torch.int64)
        while (shape := tuple(self._collectives.from_rank0(zeros).tolist())) != NO_SHAPE:
            self._run(*shape)

    def _tell(self, shape: tuple[int, int, int]) -> None:
        if self._collectives is not None:
            assert self._collectives.rank == RANK_ZERO
            self._collectives.from_rank0(torch.tensor(shape))

    def _run(self, num_rows: int, num_tokens: int, num_context_tokens: int) -> None:
        lengths = [len(part) for part in np.array_split(np.arange(num_tokens), num_rows)]
        batch = FlatBatch(
            tokens_of_text(self._text_ids, lengths),
            np.repeat(np.arange(num_rows), lengths),
            num_context_tokens + np.concatenate([np.arange(length) for length in lengths]),
        )
        if not self._goes_on:
            self._runner.assume_contexts(np.arange(num_rows), np.full(num_rows, num_context_tokens))
        self._finish(self._runner.forward(batch, np.arange(len(batch))))


def tokens_of_text(text_ids: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """int64 [T]: so many tokens for every row, as they follow each other in the text, from another place for
    each row; a short text is repeated. Zeros without one, for models in which all tokens cost the same."""
    if not text_ids:
        return np.zeros(sum(lengths), np.int64)
    starts = np.arange(len(lengths)) * len(text_ids) // len(lengths)
    places = starts.repeat(lengths) + arange_segments(np.asarray(lengths, np.int64))
    return np.asarray(text_ids, np.int64)[places % len(text_ids)]


class PassTimes:
    """Passes over up to ``largest`` tokens, each row after a context.

    The first two sizes are a token of every row, and :data:`FEW` times as many: what plain decoding costs,
    and what more tokens add to it. These two are timed whatever they take. Then come the smallest size and
    the largest, and the powers of two between them: first those that verification has, then those of a
    batch that drains. At the end all sizes are repeated, as long as the budget allows.
    """

    def __init__(
        self,
        timer: Callable[[int, int, int], int],
        *,
        num_rows: int,
        largest: int,
        most_rows: int | None = None,
        num_context_tokens: int = 0,
        prepares: bool = False,
    ) -> None:
        """
        Args:
            timer: takes the time of a pass; see :meth:`PassTimer.__call__`.
            num_rows: sequences of a batch.
            most_rows: over which a pass may be spread; by default ``num_rows``.
            prepares: a size's first pass takes longer: there is always a second.
        """
        self._timer = timer
        self._num_rows = num_rows
        self._largest = largest
        self._most_rows = most_rows or num_rows
        self._context = num_context_tokens
        self._prepares = prepares
        self._found: dict[int, list[int]] = {}

    def timed(self, fits: Fits) -> PassTimes:
        """Time all that fits."""
        self.time_first(fits)
        self.time_more(fits)
        return self

    def time_first(self, fits: Fits) -> None:
        """Time the two sizes that are timed in any case; again where that fits."""
        first = list(dict.fromkeys((self._num_rows, min(FEW * self._num_rows, self._largest))))
        for size in first:
            self._time(size)
        for size in first:
            self._time_again(size, fits)

    def time_more(self, fits: Fits) -> None:
        """Time the other sizes, after :meth:`time_first`; then all in turn, since a temporary disturbance of
        the machine affects all."""
        powers = [1 << power for power in range(self._largest.bit_length())]
        wide = [size for size in powers if size > self._num_rows]
        narrow = [size for size in reversed(powers) if size < self._num_rows]
        for size in (1, self._largest, *wide, *narrow):
            if size not in self._found and fits(self._expected_ns(size)):
                self._time(size)
                self._time_again(size, fits)
        self.repeat(fits)

    def repeat(self, fits: Fits) -> None:
        """Time all known sizes until each has :data:`NUM_PASSES` passes."""
        while min(map(len, self._found.values())) < NUM_PASSES:
            if not fits(sum(map(self.ns, self._found))):
                break
            for size in self._found:
                self._time(size)

    def ns(self, size: int) -> int:
        """The fastest pass: others at work on this machine only add to it."""
        return min(self._found[size])

    def curve(self) -> Curve:
        """A pass over fewer tokens cannot take longer than one over more: then it was disturbed."""
        sizes = sorted(self._found)
        bounded = np.minimum.accumulate([self.ns(size) for size in sizes][::-1])[::-1]
        return Curve(sizes, bounded.astype(int).tolist())

    def _time_again(self, size: int, fits: Fits) -> None:
        if self._prepares or fits(self.ns(size)):
            self._time(size)

    def _time(self, size: int) -> None:
        self._found.setdefault(size, []).append(self._timer(min(size, self._most_rows), size, self._context))

    def _expected_ns(self, size: int) -> float:
        """The time of a size that was not timed: not more than a larger one takes, nor in proportion to a
        smaller."""
        larger = [self.ns(known) for known in self._found if known >= size]
        smaller = max((known for known in self._found if known < size), default=size)
        return min(larger) if larger else self.ns(smaller) * size / smaller


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


def verify_logits(logits_NV: Tensor, *, settings: SamplingSettings, vocab_size: int) -> Tensor:
    """The target's work on its logits, as far as it takes time."""
    logits_NV = logits_NV[:, :vocab_size]
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    distributions = next_token_distributions(logits_NV, settings, zeros_N, zeros_N)
    return distributions.probabilities_of(zeros_N.to(distributions.device)).cpu()


def draw_from_logits(logits_NV: Tensor, *, draws: DraftDraws) -> Tensor:
    """The draft's work on its logits, as far as it takes time."""
    zeros_N = torch.zeros(len(logits_NV), dtype=torch.int64)
    uniforms_N = zeros_N.double().to(logits_NV.device) if draws.settings.is_random else None
    drawn = draws.draw(logits_NV, zeros_N, zeros_N, uniforms_N)
    if drawn.features_3N is not None:
        drawn.features_3N.cpu()
    return drawn.token_ids_N.cpu()
