"""One benchmark from options to result: build or load the pair, measure all methods in turn, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

from specdist.lab.benchmark.choices import nearest_first_lengths
from specdist.lab.benchmark.comparing import compare, compare_lengths
from specdist.lab.benchmark.config import COLOCATED, BenchmarkConfig
from specdist.lab.benchmark.lineup import line_up
from specdist.lab.benchmark.measuring import measure
from specdist.lab.benchmark.methods import Method, Specdist
from specdist.lab.benchmark.results import BenchmarkResult
from specdist.lab.benchmark.setting import Setting, set_up
from specdist.lab.benchmark.sides.overhead import (
    measure_features,
    measure_heads,
    measure_passes,
    measure_policies,
)
from specdist.lab.benchmark.sides.peers import peer_engines, peer_python

logger = logging.getLogger(__name__)


def run_benchmark(config: BenchmarkConfig, command: str) -> BenchmarkResult:
    """Measure everything and write ``--output``, after every repeat, so that an interrupted run loses at most
    the last one.

    Raises :class:`UserError` before anything is measured, and if the draft's own process dies.
    """
    assert config.output is not None
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if config.peers:
        peer_python(config)  # before anything is loaded
    setting = set_up(config)
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(setting.start_draft_rank()) if config.is_separate else None
        peers = stack.enter_context(peer_engines(config, setting))
        lineup = line_up(config, setting, rank, peers)
        for measured in measure(lineup.methods, setting.groups, config.repeats, setting.device):
            methods = compare(measured, setting.paged.settings)
            result = BenchmarkResult(
                peer_versions={"vLLM": peers[0].version} if peers else {},
                **setting.circumstances(config, command),
                methods=methods,
                costs=lineup.costs,
                spreads=compare_lengths(methods),
            )
            result.write(output)
    if config.overhead_repeats:
        logger.info("timing single passes, or policies and features")
        result = dataclasses.replace(result, **_overhead(config, setting, lineup.methods))
        result.write(output)
    return result


def _overhead(config: BenchmarkConfig, setting: Setting, methods: list[Method]) -> dict[str, Any]:
    """Fields of the result: single passes beside transformers, or policies and features in a round."""
    paged, rows = setting.paged, setting.rows
    num_repeats, length = config.overhead_repeats, config.num_draft_tokens
    if config.policies is None:
        passes = measure_passes(
            paged,
            num_context_tokens=setting.work.longest_prompt,
            num_draft_tokens=length,
            num_passes=num_repeats,
            seed=config.seed,
        )
        return {"overhead": passes}
    shown = nearest_first_lengths(((choice.family, choice.first_length) for choice in config.choices), length)
    timed = [
        method
        for method in methods
        if isinstance(method, Specdist)
        and method.placement == COLOCATED
        and (choice := method.order.choice).max_draft_tokens
        and shown[choice.family] == choice.first_length
    ]
    batch_sizes = sorted({method.batch_size for method in timed})
    found: dict[str, Any] = {
        "policy_overhead": measure_policies(paged, timed, rows, num_repeats),
        "feature_overhead": [
            measure_features(paged, batch_size, rows, length, num_repeats) for batch_size in batch_sizes
        ],
    }
    if paged.head is not None:
        found["head_overhead"] = [
            item
            for batch_size in batch_sizes
            for item in measure_heads(
                paged, batch_size, num_repeats, config.seed, uses_features=paged.head.uses_features
            )
        ]
    return found
