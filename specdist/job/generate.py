"""The main job: prompts in, a run folder out. ``jobs/generate.py`` calls :func:`main`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from specdist.config import GenerateConfig, parse_generate_config
from specdist.costs import CostModel
from specdist.data import RunFolder
from specdist.engine.ledger import Ledger
from specdist.engine.stopping import StopRules
from specdist.job.entry import lead_first, lead_only, log_to_file, run_rank, told_by_lead
from specdist.job.preflight import ModelPlan, RunPlan, plan_models, plan_run
from specdist.job.progress import Progress
from specdist.job.recording import Recorder
from specdist.job.replica import Replica
from specdist.job.report import comparison_lines, run_operations, run_predictions, total_stats
from specdist.job.tokens import PromptEncoder, load_tokenizer
from specdist.job.topology import Topology

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; returns its exit code. The lead's last line on stdout is a JSON document."""
    return run_rank(lambda: parse_generate_config(arguments), lambda config: config, _run)


def _run(config: GenerateConfig, topology: Topology) -> int:
    models = lead_first(topology, lambda: plan_models(config))
    run = lead_only(topology, lambda: plan_run(config, models, topology))
    try:
        return _run_planned(config, topology, models, run)
    finally:
        if run is not None:
            run.lock.release()


def _run_planned(config: GenerateConfig, topology: Topology, models: ModelPlan, run: RunPlan | None) -> int:
    """``run`` is None on every rank but the lead."""
    log_to_file(Path(config.output), topology)
    for warning in config.warnings() if run is not None else []:
        logger.warning(warning)
    if not told_by_lead(topology, run is not None and bool(run.pending_shards)):
        if run is not None:
            logger.info("%s is complete: nothing to do", config.output)
            _print_totals(config, run.folder, topology)
        return 0
    frozen = told_by_lead(topology, run.folder.manifest.info.get("costs") if run is not None else None)
    num_context_tokens = told_by_lead(
        topology, None if run is None else _middle_of_a_row(config, models, run)
    )
    replica = Replica(
        config,
        models,
        topology,
        CostModel.from_json(frozen) if frozen else None,
        num_context_tokens=num_context_tokens,
    )
    if run is None:
        replica.serve()
    else:
        if replica.costs is not None and frozen is None:
            run.folder.freeze("costs", replica.costs.to_json())
        generate_rows(config, models, run, replica)
        _print_totals(config, run.folder, topology)
    return 0


def _middle_of_a_row(config: GenerateConfig, models: ModelPlan, run: RunPlan) -> int:
    """About how many tokens stand before a pass: a prompt, and half of the longest completion."""
    if not config.needs_costs:
        return 0
    encoder = PromptEncoder(load_tokenizer(models.target), max_prompt_tokens=models.max_seq_len - 1)
    return encoder.typical_length(run.prompts) + config.max_new_tokens // 2


def generate_rows(config: GenerateConfig, models: ModelPlan, run: RunPlan, replica: Replica) -> None:
    """The lead's work: every row that is not finished, recorded as it is. The other ranks serve."""
    encoder = PromptEncoder(load_tokenizer(models.target), max_prompt_tokens=models.max_seq_len - 1)
    stop_rules = StopRules(encoder.decode, models.target.stop_token_ids(), tuple(config.stop or ()))
    num_pending = len(run.pending_shards)
    _log_exactness(config)
    if replica.ahead.num_tokens:
        logger.info(
            "the draft works ahead: %d tokens and %d branches per row",
            replica.ahead.num_tokens,
            replica.ahead.num_branches,
        )
    logger.info(
        "%d of %d shards to do, up to %d rows at a time, %d cache pages",
        num_pending,
        run.shards.num_shards,
        replica.num_slots,
        replica.num_pages,
    )
    num_done = sum(
        end - first
        for shard in range(run.shards.num_shards)
        if run.folder.is_complete(shard)
        for first, end in [run.shards.bounds(shard)]
    )
    progress = Progress(run.prompts.num_rows * config.num_samples, num_done * config.num_samples)
    ledger = Ledger()
    recorder = Recorder(
        run,
        encoder,
        ledger,
        num_samples=config.num_samples,
        progress=progress,
        is_traced=config.is_traced,
        is_exact=config.is_exact,
    )
    for completion in replica.engine(recorder.requests(), stop_rules, ledger).run():
        recorder.record(completion)
    progress.close()


def _log_exactness(config: GenerateConfig) -> None:
    if config.is_exact:
        logger.info("exact: the completions follow the target's own distribution")
    else:
        logger.warning(
            "NOT exact: --policy sprinter commits what its verifier does not doubt without asking the "
            "target; --verify all asks it"
        )


def _print_totals(config: GenerateConfig, folder: RunFolder, topology: Topology) -> None:
    _log_exactness(config)
    totals = total_stats(folder)
    predictions = run_predictions(folder, totals)
    operations = run_operations(folder, totals)
    for line in comparison_lines(predictions, totals.costs(), operations):
        logger.info(line)
    document = {
        "output": config.output,
        "exact": config.is_exact,
        **totals.summary(topology.world_size),
        "predictions": predictions.to_json(),
        "operations": {name: figure.to_json() for name, figure in operations.items()},
    }
    print(json.dumps(document))  # noqa: T201 (the job's result)
