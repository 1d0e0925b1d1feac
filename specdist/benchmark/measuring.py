"""All methods in turn on the same rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specdist.benchmark.config import COLOCATED
from specdist.benchmark.methods import Generated, Method
from specdist.benchmark.workload import Row
from specdist.engine.device_clock import timed
from specdist.stats import NS_PER_S, Stats

NUM_WARMUP_TOKENS = 8

logger = logging.getLogger(__name__)


@dataclass
class Timed:
    """One method's repeats on one group of rows."""

    num_rows: int
    seconds: list[float] = field(default_factory=list)
    generated: list[Generated] = field(default_factory=list)

    @property
    def num_tokens(self) -> list[int]:
        return [generated.num_tokens for generated in self.generated]

    @property
    def tokens_per_s(self) -> float:
        return _median_rate(self.num_tokens, self.seconds)


@dataclass
class Measured:
    """One method's repeats. Lists have an entry per repeat, of all groups together."""

    method: Method
    groups: dict[str, Timed]

    @property
    def num_repeats(self) -> int:
        """Repeats of all groups."""
        return min(len(group.seconds) for group in self.groups.values())

    @property
    def seconds(self) -> list[float]:
        return [sum(parts) for parts in zip(*(group.seconds for group in self.groups.values()), strict=True)]

    @property
    def num_tokens(self) -> list[int]:
        return [
            sum(parts) for parts in zip(*(group.num_tokens for group in self.groups.values()), strict=True)
        ]

    @property
    def tokens_per_s(self) -> float:
        return _median_rate(self.num_tokens, self.seconds)

    @property
    def decoding_tokens_per_s(self) -> float | None:
        """With prompts' passes left out; of two ranks those of the target's. None where it was not specdist.

        On small models prompts take much of a run, and no draft makes them shorter.
        """
        rates = []
        for repeat in range(self.num_repeats):
            stats = self.stats_of(repeat)
            if stats is None:
                return None
            prompts_ns = stats.target_ns.prefill
            if self.method.placement == COLOCATED:
                prompts_ns += stats.draft_ns.prefill
            rates.append(self.num_tokens[repeat] / (self.seconds[repeat] - prompts_ns / NS_PER_S))
        return statistics.median(rates)

    @property
    def completions(self) -> list[list[list[int]]]:
        """Per repeat the token ids of every row, group after group."""
        return [
            [row for group in self.groups.values() for row in group.generated[repeat].completions]
            for repeat in range(self.num_repeats)
        ]

    @property
    def stats(self) -> Stats | None:
        """Of the last repeat; None where it was not specdist."""
        return self.stats_of(self.num_repeats - 1)

    def stats_of(self, repeat: int) -> Stats | None:
        """Of one repeat."""
        total = Stats()
        for group in self.groups.values():
            stats = group.generated[repeat].stats
            if stats is None:
                return None
            total.add(stats)
        return total


def measure(
    methods: Sequence[Method], groups: Mapping[str, Sequence[Row]], repeats: int, device: torch.device
) -> Iterator[list[Measured]]:
    """Warm every method up, then run all of them on one group after another, once per repeat (ABAB...).

    What learns begins anew with every group. Yields all that has been measured after every repeat.
    """
    found = [
        Measured(method, {name: Timed(len(rows)) for name, rows in groups.items()}) for method in methods
    ]
    some_rows = list(itertools.chain.from_iterable(groups.values()))
    for method in methods:
        method.prepare()
        method.generate(
            [
                dataclasses.replace(row, max_new_tokens=NUM_WARMUP_TOKENS)
                for row in some_rows[: method.batch_size]
            ]
        )
    forecast = _Forecast(methods, groups, repeats)
    for _ in range(repeats):
        for (name, rows), item in itertools.product(groups.items(), found):
            method = item.method
            method.prepare()
            seconds, generated = timed(device, functools.partial(method.generate, rows))
            group = item.groups[name]
            group.seconds.append(seconds)
            group.generated.append(generated)
            forecast.observe(method, rows, seconds)
            logger.info(
                "%s: %s, batch %d%s: %.2f s, %.1f tokens/s",
                forecast,
                method.name,
                method.batch_size,
                f", {name}" if len(groups) > 1 else "",
                seconds,
                generated.num_tokens / seconds,
            )
        yield found


def _median_rate(num_tokens: Sequence[int], seconds: Sequence[float]) -> float:
    return statistics.median(count / each for count, each in zip(num_tokens, seconds, strict=True))


class _Forecast:
    """How much is left: every method at the rate that it has shown, or else at that of all so far."""

    def __init__(self, methods: Sequence[Method], groups: Mapping[str, Sequence[Row]], repeats: int) -> None:
        self._num_runs = len(methods) * len(groups) * repeats
        self._num_done = 0
        # Tokens that each method is still to generate at most, and what it took for how many.
        num_tokens = sum(map(_num_tokens, groups.values()))
        self._left = {id(method): num_tokens * repeats for method in methods}
        self._done = dict.fromkeys(self._left, 0)
        self._seconds = dict.fromkeys(self._left, 0.0)

    def observe(self, method: Method, rows: Sequence[Row], seconds: float) -> None:
        self._num_done += 1
        self._left[id(method)] -= _num_tokens(rows)
        self._done[id(method)] += _num_tokens(rows)
        self._seconds[id(method)] += seconds

    def __str__(self) -> str:
        overall = sum(self._seconds.values()) / sum(self._done.values())
        left_s = sum(
            num_left * (self._seconds[key] / self._done[key] if self._done[key] else overall)
            for key, num_left in self._left.items()
        )
        return f"{self._num_done} of {self._num_runs}, about {left_s / 60:.0f} min left"


def _num_tokens(rows: Sequence[Row]) -> int:
    return sum(row.max_new_tokens for row in rows)
