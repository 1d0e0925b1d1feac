"""One benchmark from options to result: build or load the pair, measure all methods in turn on the same rows,
and compare."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdist.engine.times.timeline import timed
from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.methods import (
    Generated,
    Method,
    Row,
    Specdist,
    TransformersAssisted,
    TransformersGenerate,
    shortened,
)
from specdist.lab.benchmark.pair import DraftOrder, fixed_length
from specdist.lab.benchmark.peers.engines import PeerEngine, PeerGenerate, make_environments, peer_engines
from specdist.lab.benchmark.report import console_report, summary
from specdist.lab.benchmark.results import BenchmarkResult, MethodResult
from specdist.lab.benchmark.setting import Setting, set_up
from specdist.policies.choice import PolicyChoice
from specdist.policies.registry import TARGET_ONLY, needs_costs
from specdist.sampling.distributions import SamplingSettings

NUM_WARMUP_TOKENS = 8
DEFAULT = "goodput"

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
        return self.policy == TARGET_ONLY

    @property
    def policy(self) -> str | None:
        """specdist's; None of other engines."""
        return None if self.method.order is None else self.method.order.choice.policy


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
        default = best(lambda other: other.policy == DEFAULT, size)
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
                ratio_to_peer=item.over(best(lambda other: isinstance(other.method, PeerGenerate), size)),
                default_ratio=None if default is None else default.over(item),
                num_rows_differing=None if reference is None else _num_differing(item, reference),
                statistics=None if stats is None else stats.summary(),
            )
        )
    return results


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


class Lineup:
    """The methods, in the order in which they take turns; and the costs that policies use, by placement and
    batch size: measured once, then frozen."""

    # Whether transformers runs where no other engine does.
    compares_engines = True

    def __init__(self, config: BenchmarkConfig, setting: Setting, peers: Sequence[PeerEngine]) -> None:
        """``peers``: other engines, instead of transformers. With them the default policy runs, too."""
        assert config.batch_sizes
        self.methods: list[Method] = []
        self.costs: dict[str, Any] = {}
        self._paged = setting.paged
        settings, seed = setting.paged.settings, config.seed
        has_transformers, choices = not peers and self.compares_engines, self._choices(config)
        if peers:
            choices.append(PolicyChoice.of(DEFAULT, max_draft_tokens=config.longest_draft))
        if has_transformers:
            length = config.num_draft_tokens
            self.methods.append(
                TransformersAssisted(setting.pair, settings, num_draft_tokens=length, seed=seed)
            )
        for size in config.batch_sizes:
            if has_transformers:
                generate = TransformersGenerate(setting.pair, settings, batch_size=size, seed=seed)
                self.methods.append(generate)
            self.methods += [PeerGenerate(engine, size) for engine in peers]
            self.methods.append(Specdist(self._paged, DraftOrder(num_slots=size, choice=PolicyChoice())))
            self.methods += self._drafting([DraftOrder(num_slots=size, choice=choice) for choice in choices])

    def _choices(self, config: BenchmarkConfig) -> list[PolicyChoice]:
        return [fixed_length(config.num_draft_tokens)]

    def _drafting(self, orders: Sequence[DraftOrder]) -> Iterator[Specdist]:
        """specdist's methods with these drafts, for one batch size."""
        for order in orders:
            if needs_costs(order.choice.policy):
                costs = self._paged.costs(order)
                self.costs[f"colocated, batch {order.num_slots}"] = costs.to_json()
                order = dataclasses.replace(order, costs=costs)
            yield Specdist(self._paged, order)


def benchmark(config: BenchmarkConfig, command: str) -> tuple[str, dict[str, Any]]:
    """Run the job; the text and the document to print. Raises :class:`UserError`."""
    result = run_benchmark(config, command)
    return f"{console_report(result)}\n\nall of it: {config.output}", summary(result)


def run_benchmark(config: BenchmarkConfig, command: str) -> BenchmarkResult:
    """Measure everything and write ``--output``, after every repeat, so that an interrupted run loses at most
    the last one. Raises :class:`UserError` before anything is measured."""
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    make_environments(config)
    setting = set_up(config)
    with peer_engines(config, setting) as peers:
        lineup = Lineup(config, setting, peers)
        items = [Timed(method, setting.rows) for method in lineup.methods]
        for _ in measure(items, config.repeats, setting.device):
            result = BenchmarkResult(
                **setting.circumstances(config, command),
                methods=compare(items, setting.paged.settings),
                costs=lineup.costs,
                peer_versions={peer.label: peer.version for peer in peers},
            )
            result.write(output)
    return result
