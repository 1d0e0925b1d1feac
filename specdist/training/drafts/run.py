"""``jobs/distill.py``: rows of a run, generated first if need be, become a new draft for the others."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdist.config.generate import GenerateConfig
from specdist.config.groups import HOST_SEQS
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.data.store.files import write_json
from specdist.data.store.storage import storage_path
from specdist.job.generate import generate_on_ranks
from specdist.job.models.model_plan import ModelPlan, plan_models, with_model_defaults
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.entry import on_rank0, rank0_first, run_rank
from specdist.job.ranks.signals import EXIT_STOPPED, StopRequest
from specdist.job.ranks.topology import Topology, broadcast_from_rank0
from specdist.job.rows.row_requests import prompt_encoder
from specdist.job.run.preflight import open_run_prompts
from specdist.job.totals.report import frozen_costs, total_stats
from specdist.models.files.checkpoint import Checkpoint, open_checkpoint
from specdist.models.sizes.sizes import model_size
from specdist.sampling.distributions import SamplingSettings
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.data import (
    Examples,
    num_completion_tokens,
    read_examples,
    read_prompts,
    split_examples,
)
from specdist.training.drafts.own_texts import Writer
from specdist.training.drafts.picture import draw_training
from specdist.training.drafts.student import Student
from specdist.training.drafts.training import CHECKPOINT_NAME, History, Task, Trainer
from specdist.utils.errors import UserError
from specdist.utils.json_values import parse_object

RECORD_NAME, PICTURE_NAME = "distillation.json", "distillation.png"

logger = logging.getLogger(__name__)


def run_distillation(config: DistillConfig, given: Collection[str] = ()) -> int:
    """Run one rank of the job; rank 0's last line on stdout is a JSON document.

    Returns the exit code: ``EXIT_STOPPED`` when it was stopped before its end, which the same command
    continues.
    """
    _check_output(config)
    generates = config.first is not None or config.go_on
    frame = config.run_config() if generates else training_frame(config)
    return run_rank(config, frame, partial(_run, given=given))


def training_frame(config: DistillConfig) -> GenerateConfig:
    """Options of a replica of any number of ranks, none of which has a role of its own."""
    return GenerateConfig(
        prompts=config.prompts,
        output=config.output,
        target=config.target,
        tp_size=int(os.environ.get("WORLD_SIZE", "1")),
        device=config.device,
        cpu_affinity=config.cpu_affinity,
        rank_timeout=config.rank_timeout,
    )


def _check_output(config: DistillConfig) -> None:
    """A folder of this job, or none yet. Raises :class:`UserError`."""
    folder = Path(config.new_draft)
    if not folder.exists() or any((folder / name).is_file() for name in (RECORD_NAME, CHECKPOINT_NAME)):
        return
    if any(folder.iterdir()):
        raise UserError(
            f"--new_draft {folder} is not empty, and not of an earlier distillation: give a new folder"
        )


def _run(
    config: DistillConfig,
    topology: Topology,
    stop: StopRequest,
    activity: Activity,
    *,
    given: Collection[str],
) -> int:
    run_config, folder = config.run_config(), Path(config.new_draft)
    is_done = broadcast_from_rank0(topology, (folder / RECORD_NAME).is_file())
    if config.first is not None and not is_done:
        code = generate_on_ranks(run_config, topology, stop, activity, given=given, share=config.first)
        if code:
            return code
        _free_memory()
    if is_done:
        logger.info("%s is complete: nothing to train", folder)
        document = on_rank0(topology, lambda: parse_object((folder / RECORD_NAME).read_bytes()))
    else:
        document = distil(config, topology, stop, activity, given)
        if document is None:
            return EXIT_STOPPED
    if config.go_on:
        _free_memory()
        changed = config.run_config(draft=str(folder), draft_quantization=None)
        code = generate_on_ranks(changed, topology, stop, activity, given={*given, "draft"})
        if code:
            return code
    if topology.is_rank0:
        print(json.dumps({**(document or {}), "new_draft": str(folder)}))  # noqa: T201 (the job's result)
    return 0


def distil(
    config: DistillConfig,
    topology: Topology,
    stop: StopRequest,
    activity: Activity,
    given: Collection[str],
) -> dict[str, Any] | None:
    """Train and write the draft; its record. None if it was stopped."""
    models = rank0_first(topology, lambda: plan_models(config.run_config()))
    run_config = rank0_first(topology, lambda: with_model_defaults(config.run_config(), models.target, given))
    start = rank0_first(topology, lambda: _open_start(config, models))
    activity.begin("reading the finished rows")
    examples = broadcast_from_rank0(topology, on_rank0(topology, partial(_read, config, run_config, models)))
    _log_beginning(config, run_config, examples, topology)
    activity.begin("loading the models")
    settings = SamplingSettings(
        temperature=run_config.temperature,
        top_k=run_config.top_k,
        top_p=run_config.top_p,
        is_coupled=run_config.acceptance == "gumbel",
    )
    student = Student(config, models, start, settings, topology.device)
    folder = Path(config.new_draft)
    folder.mkdir(parents=True, exist_ok=True)
    ratio = broadcast_from_rank0(topology, on_rank0(topology, partial(_cost_ratio, config, models, student)))
    writer = _writer(config, student, topology) if examples.prompts else None
    key = json.dumps(
        [config.training_options(), start.fingerprint(), models.target.fingerprint(), examples.digest()]
    )
    task = Task(
        config=config,
        examples=examples,
        topology=topology,
        cost_ratio=ratio,
        key=hashlib.sha256(key.encode()).hexdigest(),
        writer=writer,
    )
    activity.begin("training", has_progress=True)
    stop.defer_signals()
    history = Trainer(task, student, folder).run(lambda: stop.is_made)
    if history is None:
        if topology.is_rank0:
            logger.info("stopped: start the same command again to go on after the last evaluation")
        return None
    return _finish(config, task, student, history) if topology.is_rank0 else {}


def _writer(config: DistillConfig, student: Student, topology: Topology) -> Writer | None:
    """The student, which goes on with every prompt that is learned from; None without texts of its own."""
    if not config.num_own_tokens:
        return None
    return Writer(
        model=student.module,
        vocab_size=student.vocab_size,
        num_tokens=config.num_own_tokens,
        temperature=config.temperature_of_own,
        seed=config.seed,
        tokens_per_pass=config.tokens_per_pass,
        topology=topology,
    )


def _open_start(config: DistillConfig, models: ModelPlan) -> Checkpoint:
    """What the draft begins as."""
    if config.layers is not None:
        return models.target
    assert config.draft is not None
    found = models.draft or open_checkpoint(
        "--draft",
        config.draft,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    if found.drafter is not None:  # not of a run that uses it, which has refused it
        raise UserError(
            f"--draft {config.draft} is {found.drafter.what}, which is not trained here: name the folder "
            "of a draft model, or use --layers N to start from the target's first layers"
        )
    return found


def _read(config: DistillConfig, run_config: GenerateConfig, models: ModelPlan) -> Examples:
    folder = _run_folder(run_config)
    _check_run(folder, models)
    prompts, encoder = open_run_prompts(run_config), prompt_encoder(run_config, models, folder)
    found = read_examples(
        folder,
        prompts,
        encoder,
        max_sequences=config.max_sequences,
        reads_logprobs=config.resolved_teacher == "recorded",
    )
    examples = split_examples(found, config.validation_share, config.seed)
    texts = read_prompts(
        prompts,
        encoder,
        examples.held_out,
        num_rows=config.num_prompt_rows,
        max_tokens=config.tokens_per_pass,
    )
    return dataclasses.replace(examples, prompts=texts)


def _run_folder(config: GenerateConfig) -> RunFolder:
    """Of the run whose completions are learned from."""
    return RunFolder(storage_path(config.output, option="--output ", cache_dir=config.cache_dir))


def _check_run(folder: RunFolder, models: ModelPlan) -> None:
    """Completions of another target would teach the wrong distribution. Raises :class:`UserError`."""
    if not folder.manifest_path.is_file():
        raise UserError(
            f"--output {folder.path} holds no run: generate one with jobs/generate.py, or give --first 0.05 "
            "to generate its first rows here"
        )
    if folder.manifest.fingerprint.get("target") != models.target.fingerprint():
        raise UserError(
            f"--target {models.target.name} is not the model that wrote --output {folder.path}: name that "
            "run's target"
        )


def _log_beginning(
    config: DistillConfig, run_config: GenerateConfig, examples: Examples, topology: Topology
) -> None:
    if not topology.is_rank0:
        return
    if run_config.processes_logits or run_config.row_options:
        logger.warning(
            "acceptance is measured with the run's temperature, top-k and top-p alone, without penalties, "
            "min-p, constraints and options of rows"
        )
    logger.info(
        "%d completions (%d tokens) and %d prompts (%d tokens) to train on, %d completions to evaluate with; "
        "teacher %s, loss %s",
        len(examples.training),
        num_completion_tokens(examples.training),
        len(examples.prompts),
        num_completion_tokens(examples.prompts),
        len(examples.held_out),
        config.resolved_teacher,
        config.resolved_loss,
    )


def _cost_ratio(config: DistillConfig, models: ModelPlan, student: Student) -> float:
    """Time of a draft step over that of a target pass of one token per sequence."""
    if config.cost_ratio is not None:
        return config.cost_ratio
    costs = frozen_costs(_run_folder(config))
    if costs is not None and models.draft is not None:
        num_rows = config.max_num_seqs or HOST_SEQS
        found = float(costs.draft.look_up(num_rows)) / float(costs.target.look_up(num_rows))
        return found * student.num_parameters / _num_parameters(models.draft)
    return student.num_parameters / _num_parameters(models.target)


def _num_parameters(checkpoint: Checkpoint) -> int:
    size = model_size(checkpoint.name, checkpoint.config, 1, trusts_code=checkpoint.trusts_code)
    return int(size.num_parameters)


def _finish(config: DistillConfig, task: Task, student: Student, history: History) -> dict[str, Any]:
    """Write the folder for ``--draft``; the record last."""
    folder = Path(config.new_draft)
    student.save(folder)
    draw_training(history, config.resolved_loss, folder / PICTURE_NAME)
    before, after = history.prospects[0], history.prospects[history.best]
    record = {
        "target": config.target,
        "start": f"the first {config.layers} layers of the target" if config.layers else config.draft,
        "run": config.output,
        "options": config.training_options(),
        "num_training_sequences": len(task.examples.training),
        "num_training_tokens": num_completion_tokens(task.examples.training),
        "num_prompts": len(task.examples.prompts),
        "num_prompt_tokens": num_completion_tokens(task.examples.prompts),
        "num_own_tokens": history.num_own_tokens[-1],
        "num_held_out_sequences": len(task.examples.held_out),
        "num_held_out_tokens": num_completion_tokens(task.examples.held_out),
        "cost_ratio": task.cost_ratio,
        "before": before.figures(),
        "after": after.figures(),
        "steps": history.steps[history.best],
        "seconds": history.seconds[-1],
        "rest": _rest(config, before.speed_up, after.speed_up),
    }
    write_json(folder / RECORD_NAME, record | {"history": history.figures()})
    (folder / CHECKPOINT_NAME).unlink(missing_ok=True)
    _log_end(config, record, before.acceptance, after.acceptance)
    return record


def _rest(config: DistillConfig, before: float, after: float) -> dict[str, Any]:
    """What the new draft saves on the rows that are left: predicted, from the time of those that are done."""
    folder = _run_folder(config)
    plan = folder.plan()
    total = total_stats(folder)
    num_left = plan.num_completions - total.num_completions
    found: dict[str, Any] = {"num_completions": num_left, "time_ratio": before / after}
    if total.num_completions:
        seconds = total.wall_ns / NS_PER_S / total.num_completions * num_left
        found |= {"seconds_before": seconds, "seconds_after": seconds * before / after}
    return found


def _log_end(config: DistillConfig, record: dict[str, Any], before: float, after: float) -> None:
    rest = record["rest"]
    logger.info(
        "acceptance on held-out rows %.3f -> %.3f, tokens per target pass %.2f -> %.2f, predicted speed-up "
        "over plain decoding %.2f -> %.2f",
        before, after, record["before"]["tokens_per_pass"], record["after"]["tokens_per_pass"],
        record["before"]["speed_up"], record["after"]["speed_up"],
    )  # fmt: skip
    if rest["num_completions"]:
        logger.info(
            "the %d completions that are left take %.0f%% of the time that they would take with the draft "
            "as it was: give the run --draft %s",
            rest["num_completions"], 100 * rest["time_ratio"], config.new_draft,
        )  # fmt: skip


def _free_memory() -> None:
    """Of models that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
