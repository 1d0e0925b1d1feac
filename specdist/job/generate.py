"""The main job: prompts in, a run folder out. ``jobs/generate.py`` calls :func:`main`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from specdist.config import GenerateConfig, parse_generate_config
from specdist.costs import CostModel
from specdist.data import RunFolder
from specdist.engine.ledger import Ledger
from specdist.engine.stopping import StopRules
from specdist.engine.targets import LEAD_RANK
from specdist.errors import UserError
from specdist.job.preflight import ModelPlan, RunPlan, plan_models, plan_run
from specdist.job.progress import Progress
from specdist.job.recording import Recorder
from specdist.job.replica import Replica
from specdist.job.report import comparison_lines, run_predictions, total_stats
from specdist.job.tokens import PromptEncoder, load_tokenizer
from specdist.job.topology import (
    Topology,
    join_world,
    rank_from_environment,
    topology_from_environment,
)

Planned = TypeVar("Planned")
USAGE_ERROR = 2

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; returns its exit code. The lead's last line on stdout is a JSON document."""
    # Every rank finds the same error in its options, or is told of the others': it is shown once.
    shows_errors = rank_from_environment() == LEAD_RANK
    try:
        with contextlib.nullcontext() if shows_errors else contextlib.redirect_stderr(io.StringIO()):
            config = parse_generate_config(arguments)
        topology = topology_from_environment(config)
        _configure_logging(topology)
        join_world(topology)
        code = _run(config, topology)
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


def _run(config: GenerateConfig, topology: Topology) -> int:
    models = _lead_first(topology, lambda: plan_models(config))
    run = _lead_only(topology, lambda: plan_run(config, models, topology))
    try:
        return _run_planned(config, topology, models, run)
    finally:
        if run is not None:
            run.lock.release()


def _run_planned(config: GenerateConfig, topology: Topology, models: ModelPlan, run: RunPlan | None) -> int:
    """``run`` is None on every rank but the lead."""
    _log_to_file(config, topology)
    for warning in config.warnings() if run is not None else []:
        logger.warning(warning)
    if not _told_by_lead(topology, run is not None and bool(run.pending_shards)):
        if run is not None:
            logger.info("%s is complete: nothing to do", config.output)
            _print_totals(config, run.folder, topology)
        return 0
    frozen = _told_by_lead(topology, run.folder.manifest.info.get("costs") if run is not None else None)
    replica = Replica(config, models, topology, CostModel.from_json(frozen) if frozen else None)
    if run is None:
        replica.serve()
    else:
        if replica.costs is not None and frozen is None:
            run.folder.freeze("costs", replica.costs.to_json())
        _generate(config, models, run, replica)
        _print_totals(config, run.folder, topology)
    return 0


def _generate(config: GenerateConfig, models: ModelPlan, run: RunPlan, replica: Replica) -> None:
    encoder = PromptEncoder(load_tokenizer(models.target), max_prompt_tokens=models.max_seq_len - 1)
    stop_rules = StopRules(encoder.decode, models.target.stop_token_ids(), tuple(config.stop or ()))
    num_pending = len(run.pending_shards)
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
        run, encoder, ledger, num_samples=config.num_samples, progress=progress, is_traced=config.is_traced
    )
    for completion in replica.engine(recorder.requests(), stop_rules, ledger).run():
        recorder.record(completion)
    progress.close()


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
    message = _told_by_lead(topology, message)
    if message is not None:
        raise UserError(message)
    return planned


def _told_by_lead(topology: Topology, value: Any) -> Any:
    if topology.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _print_totals(config: GenerateConfig, folder: RunFolder, topology: Topology) -> None:
    totals = total_stats(folder)
    predictions = run_predictions(folder, totals)
    for line in comparison_lines(predictions, totals.costs()):
        logger.info(line)
    document = {
        "output": config.output,
        "exact": True,
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


def _log_to_file(config: GenerateConfig, topology: Topology) -> None:
    """Every rank keeps a log in the run folder, which a relaunch continues."""
    handler = logging.FileHandler(Path(config.output, "logs", f"rank-{topology.rank}.log"))
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{topology.role}] %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
