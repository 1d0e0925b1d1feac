"""One benchmark from options to result: build or load the pair, measure all methods in turn, compare."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdist.benchmark.config import BenchmarkConfig, device_of
from specdist.benchmark.measuring import compare, measure
from specdist.benchmark.methods import Method, Specdist, TransformersAssisted, TransformersGenerate
from specdist.benchmark.overhead import OVERHEAD_BATCH_SIZES, OverheadResult, measure_overhead
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.pair import Pair
from specdist.benchmark.results import (
    BenchmarkResult,
    Hardware,
    ModelSizes,
    WorkSize,
    now,
    versions,
)
from specdist.benchmark.synthetic import SyntheticRecord, build_synthetic
from specdist.benchmark.workload import Row, make_workload

logger = logging.getLogger(__name__)


def run_benchmark(config: BenchmarkConfig, command: str) -> BenchmarkResult:
    """Measure everything and write ``--output``. Raises :class:`UserError` before anything is measured."""
    assert config.output is not None
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    device = device_of(config.device)
    pair, synthetic = _make_pair(config, device)
    rows = make_workload(config, pair)
    work = _work_size(rows)
    paged = _paged_pair(config, pair, work)
    measured = measure(_methods(config, pair, paged), rows, config.repeats, device)
    overhead: list[OverheadResult] = []
    if config.overhead_repeats:
        logger.info("timing single passes")
        overhead = measure_overhead(
            paged,
            num_context_tokens=work.longest_prompt,
            num_draft_tokens=config.num_draft_tokens,
            num_passes=config.overhead_repeats,
            seed=config.seed,
        )
    result = BenchmarkResult(
        command=command,
        date=now(),
        hardware=Hardware.of_this_process(device),
        versions=versions(),
        settings=dataclasses.asdict(config),
        synthetic=synthetic,
        models=ModelSizes(
            target=config.target or f"synthetic {config.synthetic}",
            draft=config.draft or f"first layers of synthetic {config.synthetic}",
            num_target_parameters=_num_parameters(pair.target),
            num_draft_parameters=_num_parameters(pair.draft),
            dtype=pair.dtype,
        ),
        work=work,
        methods=compare(measured, is_greedy=config.temperature == 0),
        overhead=overhead,
    )
    result.write(output)
    return result


def _make_pair(config: BenchmarkConfig, device: torch.device) -> tuple[Pair, SyntheticRecord | None]:
    if config.synthetic is None:
        assert config.target is not None and config.draft is not None
        return Pair(config.target, config.draft, dtype=config.dtype, device=device), None
    dtype = "float32" if config.dtype == "auto" else config.dtype
    dial = f"epsilon-{config.epsilon:g}" if config.acceptance is None else f"acceptance-{config.acceptance:g}"
    folder = Path(config.synthetic_folder) / f"{config.synthetic}-{dial}-{dtype}-seed-{config.seed}"
    record = build_synthetic(
        folder,
        config.synthetic,
        acceptance=config.acceptance,
        epsilon=config.epsilon,
        seed=config.seed,
        dtype=getattr(torch, dtype),
        device=device,
    )
    pair = Pair(str(folder / "target"), str(folder / "draft"), dtype=dtype, device=device)
    return pair, record


def _paged_pair(config: BenchmarkConfig, pair: Pair, work: WorkSize) -> PagedPair:
    assert config.batch_sizes
    return PagedPair(
        pair,
        max_batch_rows=max(*config.batch_sizes, *OVERHEAD_BATCH_SIZES),
        max_seq_len=work.longest_prompt + work.longest_limit,
        max_draft_tokens=config.num_draft_tokens,
        temperature=config.temperature,
        seed=config.seed,
    )


def _methods(config: BenchmarkConfig, pair: Pair, paged: PagedPair) -> list[Method]:
    assert config.batch_sizes
    temperature, seed = config.temperature, config.seed
    methods: list[Method] = [
        TransformersAssisted(
            pair, num_draft_tokens=config.num_draft_tokens, temperature=temperature, seed=seed
        )
    ]
    for batch_size in config.batch_sizes:
        methods += [
            TransformersGenerate(pair, batch_size=batch_size, temperature=temperature, seed=seed),
            Specdist(paged, batch_size=batch_size, num_draft_tokens=0),
            Specdist(paged, batch_size=batch_size, num_draft_tokens=config.num_draft_tokens),
        ]
    return methods


def _work_size(rows: Sequence[Row]) -> WorkSize:
    prompts = [len(row.prompt_ids) for row in rows]
    limits = [row.max_new_tokens for row in rows]
    return WorkSize(
        num_rows=len(rows),
        shortest_prompt=min(prompts),
        longest_prompt=max(prompts),
        shortest_limit=min(limits),
        longest_limit=max(limits),
    )


def _num_parameters(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())
