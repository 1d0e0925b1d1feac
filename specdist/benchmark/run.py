"""One benchmark from options to result: build or load the pair, measure all methods in turn, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.draft_rank import DraftRank
from specdist.benchmark.drafts import DraftOrder
from specdist.benchmark.measuring import compare, measure
from specdist.benchmark.methods import Method, TransformersAssisted, TransformersGenerate
from specdist.benchmark.overhead import OverheadResult, measure_overhead
from specdist.benchmark.placements import SpecdistColocated, SpecdistSeparate, plan_separate
from specdist.benchmark.results import BenchmarkResult, Hardware, now, versions
from specdist.benchmark.setting import Setting, set_up

logger = logging.getLogger(__name__)


def run_benchmark(config: BenchmarkConfig, command: str) -> BenchmarkResult:
    """Measure everything and write ``--output``. Raises :class:`UserError` before anything is measured, and
    if the draft's own process dies."""
    assert config.output is not None
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    setting = set_up(config)
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(setting.start_draft_rank()) if config.is_separate else None
        methods, costs = _methods(config, setting, rank)
        measured = measure(methods, setting.rows, config.repeats, setting.device)
    overhead: list[OverheadResult] = []
    if config.overhead_repeats:
        logger.info("timing single passes")
        overhead = measure_overhead(
            setting.paged,
            num_context_tokens=setting.work.longest_prompt,
            num_draft_tokens=config.num_draft_tokens,
            num_passes=config.overhead_repeats,
            seed=config.seed,
        )
    result = BenchmarkResult(
        command=command,
        date=now(),
        hardware=Hardware.of_this_process(setting.device),
        versions=versions(),
        settings=dataclasses.asdict(config),
        synthetic=setting.synthetic,
        models=setting.models,
        work=setting.work,
        methods=compare(measured, is_greedy=config.temperature == 0),
        overhead=overhead,
        costs=costs,
    )
    result.write(output)
    return result


def _methods(
    config: BenchmarkConfig, setting: Setting, rank: DraftRank | None
) -> tuple[list[Method], dict[str, Any]]:
    """What is to be measured; and by batch size the costs that the work ahead was planned by."""
    assert config.batch_sizes
    pair, paged = setting.pair, setting.paged
    temperature, seed = config.temperature, config.seed
    costs: dict[str, Any] = {}
    methods: list[Method] = [
        TransformersAssisted(
            pair, num_draft_tokens=config.num_draft_tokens, temperature=temperature, seed=seed
        )
    ]
    for batch_size in config.batch_sizes:
        alone = DraftOrder(num_slots=batch_size, num_draft_tokens=0)
        order = dataclasses.replace(alone, num_draft_tokens=config.num_draft_tokens)
        methods += [
            TransformersGenerate(pair, batch_size=batch_size, temperature=temperature, seed=seed),
            SpecdistColocated(paged, alone),
        ]
        if config.is_colocated:
            methods.append(SpecdistColocated(paged, order))
        if rank is not None:
            plan = plan_separate(paged, rank, order, config.num_branches)
            costs[str(batch_size)] = plan.costs.to_json()
            methods += [SpecdistSeparate(paged, rank, item) for item in plan.orders]
    return methods, costs
