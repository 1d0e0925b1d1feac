"""One benchmark from options to result: build or load the pair, measure all methods in turn, compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdist.lab.benchmark.config import BenchmarkConfig
from specdist.lab.benchmark.measuring import Timed, compare, measure
from specdist.lab.benchmark.methods import Method, Specdist, TransformersAssisted, TransformersGenerate
from specdist.lab.benchmark.pair import DraftOrder, fixed_length
from specdist.lab.benchmark.peers import Vllm, VllmEngine, peer_engines, peer_python
from specdist.lab.benchmark.report import console_report, summary
from specdist.lab.benchmark.results import BenchmarkResult
from specdist.lab.benchmark.setting import Setting, set_up
from specdist.policies.choice import PolicyChoice
from specdist.policies.registry import needs_costs


class Lineup:
    """The methods, in the order in which they take turns; and the costs that policies use, by placement and
    batch size: measured once, then frozen."""

    def __init__(self, config: BenchmarkConfig, setting: Setting, peers: Mapping[int, VllmEngine]) -> None:
        """``peers``: engines of vLLM by number of draft tokens, instead of transformers. With them
        ``goodput`` runs, too."""
        assert config.batch_sizes
        self.methods: list[Method] = []
        self.costs: dict[str, Any] = {}
        self._paged = setting.paged
        settings, seed = setting.paged.settings, config.seed
        has_transformers, choices = not peers and self._compares_engines(config), self._choices(config)
        if peers:
            choices.append(PolicyChoice.of("goodput", max_draft_tokens=config.longest_draft))
        if has_transformers:
            length = config.num_draft_tokens
            self.methods.append(
                TransformersAssisted(setting.pair, settings, num_draft_tokens=length, seed=seed)
            )
        for size in config.batch_sizes:
            if has_transformers:
                generate = TransformersGenerate(setting.pair, settings, batch_size=size, seed=seed)
                self.methods.append(generate)
            self.methods += [Vllm(setting, engine, length, size) for length, engine in peers.items()]
            self.methods.append(Specdist(self._paged, DraftOrder(num_slots=size, choice=PolicyChoice())))
            self.methods += self._drafting(
                config, [DraftOrder(num_slots=size, choice=choice) for choice in choices]
            )

    def _compares_engines(self, config: BenchmarkConfig) -> bool:
        """Whether transformers runs where no other engine does."""
        del config
        return True

    def _choices(self, config: BenchmarkConfig) -> list[PolicyChoice]:
        return [fixed_length(config.num_draft_tokens)]

    def _drafting(self, config: BenchmarkConfig, orders: Sequence[DraftOrder]) -> Iterator[Specdist]:
        """specdist's methods with these drafts, for one batch size."""
        del config
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
    if config.peers:
        peer_python(config)  # before anything is loaded
    setting = set_up(config)
    with peer_engines(config, setting) as peers:
        lineup = Lineup(config, setting, peers)
        items = [Timed(method, setting.rows) for method in lineup.methods]
        for _ in measure(items, config.repeats, setting.device):
            result = BenchmarkResult(
                **setting.circumstances(config, command),
                methods=compare(items, setting.paged.settings),
                costs=lineup.costs,
                peer_versions={"vLLM": peers[0].version} if peers else {},
            )
            result.write(output)
    return result
