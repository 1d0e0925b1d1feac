"""One benchmark from options to result: build or load the pair, measure all methods in turn, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path

from specdist.benchmark.comparing import compare, compare_lengths
from specdist.benchmark.config import COLOCATED, BenchmarkConfig
from specdist.benchmark.lineup import Lineup, line_up
from specdist.benchmark.measuring import Measured, measure
from specdist.benchmark.methods import Specdist
from specdist.benchmark.overhead import measure_features, measure_heads, measure_passes, measure_policies
from specdist.benchmark.results import BenchmarkResult
from specdist.benchmark.setting import Setting, set_up
from specdist.benchmark.spread import nearest_first_lengths

logger = logging.getLogger(__name__)


def run_benchmark(config: BenchmarkConfig, command: str) -> BenchmarkResult:
    """Measure everything and write ``--output``, first after one repeat: what ends a long run costs at most
    the repeat that it was in.

    Raises :class:`UserError` before anything is measured, and if the draft's own process dies.
    """
    assert config.output is not None
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    setting = set_up(config)
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(setting.start_draft_rank()) if config.is_separate else None
        lineup = line_up(config, setting, rank)
        for measured in measure(lineup.methods, setting.groups, config.repeats, setting.device):
            result = _result(config, command, setting, lineup, measured)
            result.write(output)
    result = _with_overhead(config, setting, lineup, result)
    result.write(output)
    return result


def _result(
    config: BenchmarkConfig, command: str, setting: Setting, lineup: Lineup, measured: list[Measured]
) -> BenchmarkResult:
    """Of the repeats so far."""
    methods = compare(measured, setting.paged.settings)
    return BenchmarkResult(
        **setting.circumstances(config, command),
        methods=methods,
        overhead=[],
        costs=lineup.costs,
        spreads=compare_lengths(methods),
    )


def _with_overhead(
    config: BenchmarkConfig, setting: Setting, lineup: Lineup, result: BenchmarkResult
) -> BenchmarkResult:
    """And what single passes cost beside transformers, or policies and features in a round."""
    num_repeats, length = config.overhead_repeats, config.num_draft_tokens
    if not num_repeats:
        return result
    if config.policies is None:
        logger.info("timing single passes")
        overhead = measure_passes(
            setting.paged,
            num_context_tokens=setting.work.longest_prompt,
            num_draft_tokens=length,
            num_passes=num_repeats,
            seed=config.seed,
        )
        return dataclasses.replace(result, overhead=overhead)
    logger.info("timing policies and features")
    shown = nearest_first_lengths(((choice.family, choice.first_length) for choice in config.choices), length)
    methods = [
        method
        for method in lineup.methods
        if isinstance(method, Specdist)
        and method.placement == COLOCATED
        and (choice := method.order.choice).max_draft_tokens
        and shown[choice.family] == choice.first_length
    ]
    batch_sizes = sorted({method.batch_size for method in methods})
    head = setting.paged.head
    return dataclasses.replace(
        result,
        policy_overhead=measure_policies(setting.paged, methods, setting.rows, num_repeats),
        feature_overhead=[
            measure_features(setting.paged, batch_size, setting.rows, length, num_repeats)
            for batch_size in batch_sizes
        ],
        head_overhead=[
            item
            for batch_size in batch_sizes
            if head is not None
            for item in measure_heads(
                setting.paged, batch_size, num_repeats, config.seed, uses_features=head.uses_features
            )
        ],
    )
