"""All methods in turn on the same rows, and how they compare."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specdist.engine.times.timeline import timed
from specdist.lab.benchmark.methods import (
    Generated,
    Method,
    Row,
    TransformersAssisted,
    TransformersGenerate,
    shortened,
)
from specdist.lab.benchmark.results import MethodResult
from specdist.policies.registry import TARGET_ONLY
from specdist.sampling.distributions import SamplingSettings

NUM_WARMUP_TOKENS = 8

logger = logging.getLogger(__name__)


@dataclass
class Timed:
    """One method's repeats on the same rows. Lists have an entry per repeat."""

    method: Method
    rows: Sequence[Row]
    seconds: list[float] = field(default_factory=list)
    generated: list[Generated] = field(default_factory=list)

    @property
    def num_tokens(self) -> list[int]:
        return [generated.num_tokens for generated in self.generated]

    @property
    def tokens_per_s(self) -> float:
        """The median."""
        return statistics.median(
            count / each for count, each in zip(self.num_tokens, self.seconds, strict=True)
        )

    def over(self, base: Timed | None) -> float | None:
        """Tokens/s over those of another; None where that was not measured."""
        return None if base is None else self.tokens_per_s / base.tokens_per_s

    @property
    def is_target_only(self) -> bool:
        """Of specdist without a draft."""
        return self.method.order is not None and self.method.order.choice.policy == TARGET_ONLY


def measure(items: Sequence[Timed], repeats: int, device: torch.device) -> Iterator[int]:
    """Warm every method up, then run all of them once per repeat (ABAB...), each time with a new policy
    object. Yields the number of repeats so far, after each."""
    for item in items:
        item.method.prepare()
        item.method.generate(shortened(item.rows[: item.method.batch_size], NUM_WARMUP_TOKENS))
    begin, num_runs = time.monotonic(), len(items) * repeats
    for repeat in range(repeats):
        for number, item in enumerate(items, 1 + repeat * len(items)):
            item.method.prepare()
            seconds, generated = timed(device, functools.partial(item.method.generate, item.rows))
            item.seconds.append(seconds)
            item.generated.append(generated)
            left_s = (time.monotonic() - begin) / number * (num_runs - number)
            logger.info(
                "%d of %d, about %.0f min left: %s, batch %d: %.2f s, %.1f tokens/s",
                *(number, num_runs, left_s / 60, item.method.name, item.method.batch_size),
                *(seconds, generated.num_tokens / seconds),
            )
        yield repeat + 1


def compare(items: Sequence[Timed], settings: SamplingSettings) -> list[MethodResult]:
    """Medians and ratios; and how many rows differ from those of the first ``generate``, or of the target
    alone where transformers was not measured."""

    def best(is_meant: Callable[[Timed], bool], batch_size: int) -> Timed | None:
        found = (item for item in items if item.method.batch_size == batch_size and is_meant(item))
        return max(found, key=lambda item: item.tokens_per_s, default=None)

    reference = _reference(items, settings)
    results = []
    for item in items:
        stats, size = item.generated[-1].stats, item.method.batch_size
        results.append(
            MethodResult(
                name=item.method.name,
                batch_size=size,
                seconds=item.seconds,
                num_tokens=item.num_tokens,
                tokens_per_s=item.tokens_per_s,
                ratio_to_assisted=item.over(best(_is_named(TransformersAssisted), 1)),
                ratio_to_generate=item.over(best(_is_named(TransformersGenerate), size)),
                ratio_to_target_only=item.over(best(lambda other: other.is_target_only, size)),
                ratio_to_peer=item.over(best(lambda other: is_peer(other.method), size)),
                num_rows_differing=None if reference is None else _num_differing(item, reference),
                statistics=None if stats is None else stats.summary(),
            )
        )
    return results


def is_peer(method: Method) -> bool:
    """Whether it is of another engine than specdist and transformers."""
    return method.order is None and not isinstance(method, TransformersGenerate)


def _is_named(kind: type[TransformersGenerate]) -> Callable[[Timed], bool]:
    return lambda item: item.method.name == kind.name


def _reference(items: Sequence[Timed], settings: SamplingSettings) -> list[list[int]] | None:
    """The completions that all others should equal; None where they may differ."""
    plain = list(filter(_is_named(TransformersGenerate), items))
    alone = [item for item in items if item.is_target_only]
    # With Gumbel noise the tokens are those of the target alone for the seed, but not in transformers.
    is_comparable = settings.is_greedy if plain else not settings.is_random
    if not is_comparable or not (plain or alone):
        return None
    return min(plain or alone, key=lambda item: item.method.batch_size).generated[0].completions


def _num_differing(item: Timed, reference: list[list[int]]) -> int:
    """Rows that differ in any repeat."""
    return sum(
        any(generated.completions[row] != completion for generated in item.generated)
        for row, completion in enumerate(reference)
    )
