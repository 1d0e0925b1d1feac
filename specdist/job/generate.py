"""The main job: prompts in, a run folder out. ``jobs/generate.py`` calls :func:`main`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from specdist.config import GenerateConfig, parse_generate_config
from specdist.costs import CostModel
from specdist.engine.ledger import Ledger
from specdist.engine.stopping import StopRules
from specdist.engine.targets import LEAD_RANK
from specdist.errors import UserError
from specdist.job.preflight import ModelPlan, RunPlan, freeze_costs, plan_models, plan_run
from specdist.job.progress import Progress
from specdist.job.recording import Recorder
from specdist.job.replica import Replica
from specdist.job.report import comparison_lines, run_predictions, total_stats
from specdist.job.signals import EXIT_STOPPED, StopRequest
from specdist.job.tokens import PromptEncoder, load_tokenizer
from specdist.job.topology import (
    Topology,
    join_world,
    rank_from_environment,
    told_by_lead,
    topology_from_environment,
)
from specdist.job.turns import Turn, follow_turns, lead_turns

Planned = TypeVar("Planned")
USAGE_ERROR = 2

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; the lead's last line on stdout is a JSON document.

    Returns the exit code: 0 when the run is complete, ``EXIT_STOPPED`` when it was stopped before, and
    ``USAGE_ERROR`` for a :class:`UserError`, whose message it prints.
    """
    # Every rank finds the same error in its options, or is told of the others': it is shown once.
    shows_errors = rank_from_environment() == LEAD_RANK
    stop = StopRequest()
    try:
        with contextlib.nullcontext() if shows_errors else contextlib.redirect_stderr(io.StringIO()):
            config = parse_generate_config(arguments)
        topology = topology_from_environment(config)
        _configure_logging(topology)
        join_world(topology)
        code = _run(config, topology, stop)
        if dist.is_initialized():
            dist.barrier()  # nobody hangs up while another rank is still talking
        return code
    except UserError as error:
        if shows_errors:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201 (what the user is to read, not a log line)
        return USAGE_ERROR
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        stop.close()


def _run(config: GenerateConfig, topology: Topology, stop: StopRequest) -> int:
    models = _lead_first(topology, lambda: plan_models(config))
    run = _lead_only(topology, lambda: plan_run(config, models, topology))
    try:
        return _run_planned(config, topology, models, run, stop)
    finally:
        if run is not None:
            run.membership.leave()


def _run_planned(
    config: GenerateConfig, topology: Topology, models: ModelPlan, run: RunPlan | None, stop: StopRequest
) -> int:
    """``run`` is None on every rank but the lead."""
    _log_to_file(config, topology, told_by_lead(topology, run.membership.replica if run is not None else ""))
    for warning in config.warnings() if run is not None else []:
        logger.warning(warning)
    if not told_by_lead(topology, run is not None and bool(run.pending_shards)):
        if run is not None:
            logger.info("%s is complete: nothing to do", config.output)
            _print_totals(config, run, topology)
        return 0
    frozen = told_by_lead(topology, run.folder.manifest.info.get("costs") if run is not None else None)
    replica = Replica(
        config,
        models,
        topology,
        CostModel.from_json(frozen) if frozen else None,
        agree=lambda costs: freeze_costs(run, costs) if run is not None else costs,
    )
    stop.become_gentle()
    if run is None:
        is_complete = follow_turns(topology, replica)
    else:
        is_complete = _generate(config, models, run, replica, topology, stop)
        _print_totals(config, run, topology)
    return 0 if is_complete else EXIT_STOPPED


def _generate(
    config: GenerateConfig,
    models: ModelPlan,
    run: RunPlan,
    replica: Replica,
    topology: Topology,
    stop: StopRequest,
) -> bool:
    """The lead's part; returns whether the run is complete."""
    encoder = PromptEncoder(load_tokenizer(models.target), max_prompt_tokens=models.max_seq_len - 1)
    stop_rules = StopRules(encoder.decode, models.target.stop_token_ids(), tuple(config.stop or ()))
    if replica.ahead.num_tokens:
        logger.info(
            "the draft works ahead: %d tokens and %d branches per row",
            replica.ahead.num_tokens,
            replica.ahead.num_branches,
        )
    logger.info(
        "%d of %d shards to do, up to %d rows at a time, %d cache pages",
        len(run.pending_shards),
        run.shards.num_shards,
        replica.num_slots,
        replica.num_pages,
    )
    progress = Progress(run.prompts.num_rows * config.num_samples, 0)
    ledger = Ledger()
    recorder = Recorder(
        run, encoder, ledger, num_samples=config.num_samples, progress=progress, is_traced=config.is_traced
    )
    run.membership.heartbeat.begin()
    try:
        for turn in lead_turns(topology, run, recorder, stop):
            if turn is Turn.WORK:
                engine = replica.engine(recorder.requests(), stop_rules, ledger)
                for completion in engine.run(lambda: stop.is_made):
                    recorder.record(completion)
    finally:
        recorder.close()
        progress.close()
    return recorder.is_run_complete


def _lead_first(topology: Topology, plan: Callable[[], Planned]) -> Planned:
    """Run on the lead and then on the others: it may fetch files, and its error is everybody's."""
    planned = _lead_only(topology, plan)
    return plan() if planned is None else planned


def _lead_only(topology: Topology, plan: Callable[[], Planned]) -> Planned | None:
    """Run on the lead alone; its :class:`UserError` is raised on every rank."""
    planned: Planned | None = None
    message: str | None = None
    if topology.is_lead:
        try:
            planned = plan()
        except UserError as error:
            message = str(error)
    message = told_by_lead(topology, message)
    if message is not None:
        raise UserError(message)
    return planned


def _print_totals(config: GenerateConfig, run: RunPlan, topology: Topology) -> None:
    folder = run.folder
    totals = total_stats(folder)
    predictions = run_predictions(folder, totals)
    for line in comparison_lines(predictions, totals.costs()):
        logger.info(line)
    document = {
        "output": config.output,
        "exact": True,
        "complete": not run.pending_shards,
        **totals.summary(topology.world_size),
        "predictions": predictions.to_json(),
    }
    print(json.dumps(document))  # noqa: T201 (the job's result)


def _configure_logging(topology: Topology) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if topology.is_lead else logging.WARNING,
        format=f"%(asctime)s [{topology.role}] %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    # The last one has a line for every layer of every pass.
    for noisy in ("httpx", "DeepSpeed", "torch.nn.attention.varlen"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _log_to_file(config: GenerateConfig, topology: Topology, replica: str) -> None:
    """Every rank of every replica keeps a log of its own in the run folder."""
    handler = logging.FileHandler(Path(config.output, "logs", f"{replica}-rank-{topology.rank}.log"))
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{topology.role}] %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
