"""All methods in turn on the same rows, and how they compare."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdist.benchmark.methods import Generated, Method, TransformersAssisted, TransformersGenerate
from specdist.benchmark.overlap import OverlapResult, overlap_of
from specdist.benchmark.placements import SpecdistSeparate
from specdist.benchmark.results import MethodResult
from specdist.benchmark.timing import timed
from specdist.benchmark.workload import Row

NUM_WARMUP_TOKENS = 8

logger = logging.getLogger(__name__)


@dataclass
class Measured:
    """One method's repeats."""

    method: Method
    seconds: list[float] = field(default_factory=list)
    generated: list[Generated] = field(default_factory=list)

    @property
    def num_tokens(self) -> list[int]:
        return [generated.num_tokens for generated in self.generated]

    @property
    def tokens_per_s(self) -> float:
        rates = [count / seconds for count, seconds in zip(self.num_tokens, self.seconds, strict=True)]
        return statistics.median(rates)


def measure(
    methods: Sequence[Method], rows: Sequence[Row], repeats: int, device: torch.device
) -> list[Measured]:
    """Warm every method up, then run all of them once per repeat (ABAB...)."""
    found = [Measured(method) for method in methods]
    for method in methods:
        method.prepare()
        method.generate(
            [dataclasses.replace(row, max_new_tokens=NUM_WARMUP_TOKENS) for row in rows[: method.batch_size]]
        )
    for repeat, item in itertools.product(range(repeats), found):
        method = item.method
        method.prepare()
        seconds, generated = timed(device, functools.partial(method.generate, rows))
        item.seconds.append(seconds)
        item.generated.append(generated)
        logger.info(
            "%d of %d: %s, batch %d: %.2f s, %.1f tokens/s",
            repeat + 1,
            repeats,
            method.name,
            method.batch_size,
            seconds,
            generated.num_tokens / seconds,
        )
    return found


def compare(measured: Sequence[Measured], *, is_greedy: bool) -> list[MethodResult]:
    """Medians, ratios, and how many rows differ from those of the first ``generate``."""
    plain = {
        item.method.batch_size: item for item in measured if item.method.name == TransformersGenerate.name
    }
    assisted = next(item for item in measured if item.method.name == TransformersAssisted.name)
    in_turns = {item.method.batch_size: item for item in measured if _is_separate_in_turns(item.method)}
    reference = plain[min(plain)].generated[0].completions
    return [
        MethodResult(
            name=item.method.name,
            batch_size=item.method.batch_size,
            seconds=item.seconds,
            num_tokens=item.num_tokens,
            median_s=statistics.median(item.seconds),
            tokens_per_s=item.tokens_per_s,
            ratio_to_assisted=item.tokens_per_s / assisted.tokens_per_s,
            ratio_to_generate=_ratio_to(plain.get(item.method.batch_size), item),
            num_rows_differing=_num_differing(item, reference) if is_greedy else None,
            statistics=None if (stats := item.generated[-1].stats) is None else stats.summary(),
            overlap=_overlap(item, in_turns.get(item.method.batch_size)),
        )
        for item in measured
    ]


def _is_separate_in_turns(method: Method) -> bool:
    return isinstance(method, SpecdistSeparate) and not method.order.ahead.num_tokens


def _overlap(item: Measured, in_turns: Measured | None) -> OverlapResult | None:
    """Of specdist with a draft, wherever the draft was run on a rank of its own too."""
    order, stats = item.method.order, item.generated[-1].stats
    if in_turns is None or order is None or not order.num_draft_tokens:
        return None
    assert stats is not None
    return overlap_of(stats, order, _ratio_to(in_turns, item))


def _ratio_to(base: Measured | None, item: Measured) -> float | None:
    return None if base is None else item.tokens_per_s / base.tokens_per_s


def _num_differing(item: Measured, reference: list[list[int]]) -> int:
    """Rows that differ in any repeat."""
    return sum(
        any(generated.completions[row] != completion for generated in item.generated)
        for row, completion in enumerate(reference)
    )
