"""All methods in turn on the same rows."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specdist.engine.times.timeline import timed
from specdist.lab.benchmark.methods import Generated, Method, Row, shortened

NUM_WARMUP_TOKENS = 8

logger = logging.getLogger(__name__)


@dataclass
class Timed:
    """One method's repeats on the same rows. Lists have an entry per repeat."""

    num_rows: int
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


@dataclass
class Measured:
    """One method's repeats on every group of rows."""

    method: Method
    groups: dict[str, Timed]

    @property
    def whole(self) -> Timed:
        """All groups together, repeat by repeat."""
        groups = list(self.groups.values())
        return Timed(
            sum(group.num_rows for group in groups),
            [sum(seconds) for seconds in zip(*(group.seconds for group in groups), strict=True)],
            [Generated.joined(parts) for parts in zip(*(group.generated for group in groups), strict=True)],
        )


def measure(
    methods: Sequence[Method], groups: Mapping[str, Sequence[Row]], repeats: int, device: torch.device
) -> Iterator[list[Measured]]:
    """Warm every method up, then run all of them on one group after another, once per repeat (ABAB...).

    Every run has a new policy object. Yields all measurements so far after every repeat.
    """
    found = [
        Measured(method, {name: Timed(len(rows)) for name, rows in groups.items()}) for method in methods
    ]
    all_rows = list(itertools.chain.from_iterable(groups.values()))
    for method in methods:
        method.prepare()
        method.generate(shortened(all_rows[: method.batch_size], NUM_WARMUP_TOKENS))
    begin, num_runs, num_done = time.monotonic(), len(methods) * len(groups) * repeats, 0
    for _ in range(repeats):
        for (name, rows), item in itertools.product(groups.items(), found):
            method, group = item.method, item.groups[name]
            method.prepare()
            seconds, generated = timed(device, functools.partial(method.generate, rows))
            group.seconds.append(seconds)
            group.generated.append(generated)
            num_done += 1
            left_s = (time.monotonic() - begin) / num_done * (num_runs - num_done)
            logger.info(
                "%d of %d, about %.0f min left: %s, batch %d%s: %.2f s, %.1f tokens/s",
                *(num_done, num_runs, left_s / 60, method.name, method.batch_size),
                *(f", {name}" if len(groups) > 1 else "", seconds, generated.num_tokens / seconds),
            )
        yield found
