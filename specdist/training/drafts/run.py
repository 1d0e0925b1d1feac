"""``jobs/distill.py``: the finished rows of a run become a new draft for the others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist.config.generate import GenerateConfig
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.files import write_json
from specdist.data.store.storage import storage_path
from specdist.job.models.model_plan import ModelPlan, plan_models
from specdist.job.rows.row_requests import prompt_encoder
from specdist.job.run.opening import open_run_prompts
from specdist.models.files.checkpoint import SMALL_FILE_SUFFIXES, Checkpoint, open_checkpoint
from specdist.models.files.damage import reading
from specdist.models.quantized.quantized import quantization_of
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.data import Examples, read_examples
from specdist.training.drafts.trainer import DraftTrainer
from specdist.utils.errors import UserError

RECORD_NAME, CHECKPOINTS, KEY_NAME = "distillation.json", "checkpoints", "training.json"
# Options that say where things are.
PLACES = ("run", "new_draft", "target", "prompts", "draft", "device")
# A tokenizer's files are copied; others are the model's, and are written with it.
TOKENIZER_FILES = re.compile(r"(token|vocab|merges|special|added|chat_template|spiece).*")

logger = logging.getLogger(__name__)


def run_distillation(config: DistillConfig) -> int | tuple[str, dict[str, Any]]:
    """Run one rank of the training, or go on with one that was killed; on rank 0 returns what is printed:
    nothing, and the record of the training."""
    folder, run = Path(config.new_draft), config.run_options()
    if not (folder / RECORD_NAME).is_file():
        _train(config, run, folder)
    if os.environ.get("RANK", "0") != "0":
        return 0
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    record: dict[str, Any] = json.loads((folder / RECORD_NAME).read_text())
    return "", {name: value for name, value in record.items() if name != "history"}


def _train(config: DistillConfig, run: GenerateConfig, folder: Path) -> None:
    """Train from the last checkpoint, if there is one, until the record is written."""
    checkpoints = folder / CHECKPOINTS
    if folder.exists() and not checkpoints.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"--new_draft {folder} is not empty, and not of an earlier distillation: give a new folder"
        )
    teacher, models = config.teacher_of(run), plan_models(run)
    start, output = _open_start(run, models), RunFolder(storage_path(run.output, option="--run "))
    if output.manifest.fingerprint.get("target") != models.target.fingerprint():
        raise UserError(
            f"--target {models.target.name} is not the model that wrote --run {config.run}: name that "
            "run's target"
        )
    encoder = prompt_encoder(run, models, output)
    examples = read_examples(output, open_run_prompts(run), encoder, config, teacher)
    key = {
        "options": {name: value for name, value in vars(config).items() if name not in PLACES},
        "models": [start.fingerprint(), models.target.fingerprint()],
        "examples": examples.digest(),
    }
    if (checkpoints / KEY_NAME).is_file() and json.loads((checkpoints / KEY_NAME).read_text()) != key:
        raise UserError(
            f"--new_draft {folder} is of a training with other options, models or rows: give another folder, "
            f"or delete {checkpoints} to train afresh"
        )
    draft, target = load_plain(start, torch.float32), None
    if teacher == "target":
        target = load_plain(models.target, models.target.torch_dtype(run.dtype))
    trainer = DraftTrainer(
        config, run, examples, draft, target, vocab_size=models.vocab_size, folder=str(checkpoints)
    )
    last = _last_checkpoint(checkpoints)
    trainer.args.eval_on_start = last is None
    if trainer.is_world_process_zero():
        write_json(checkpoints / KEY_NAME, key)
    trainer.train(resume_from_checkpoint=last)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        _save(draft, start, start.torch_dtype(run.dtype), folder)
        _record(config, run, examples, trainer)


def _open_start(run: GenerateConfig, models: ModelPlan) -> Checkpoint:
    """The draft to start from. Raises :class:`UserError`."""
    assert run.draft is not None
    found = models.draft or open_checkpoint("--draft", run.draft, trust_remote_code=run.trust_remote_code)
    if found.drafter is not None:  # not of a run that uses it, which has refused it
        raise UserError(
            f"--draft {run.draft} is {found.drafter.what}, which is not trained here: name the folder "
            "of a draft model"
        )
    return found


def load_plain(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers runs it. Raises :class:`UserError`."""
    what = f"{checkpoint.option} {checkpoint.name}"
    if quantization_of(checkpoint) is not None or checkpoint.adapter is not None:
        raise UserError(
            f"{what} is quantised or has an adapter, and only a plain model can be trained, or loaded as a "
            "teacher here: name the folder of a plain model, or leave the target out with --teacher tokens"
        )
    with reading(what):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=dtype,
            trust_remote_code=checkpoint.trusts_code,
            use_safetensors=True,
        )
    return model


def _last_checkpoint(folder: Path) -> str | None:
    """The latest whose state, which is written last, can be read: a kill may have cut another short."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        with contextlib.suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text())
            logger.info("going on after %s", path)
            return str(path)
    return None


def _save(draft: PreTrainedModel, start: Checkpoint, dtype: torch.dtype, folder: Path) -> None:
    """Write the folder that ``--draft`` takes: with the tokenizer of what it began with, and weights in
    that model's own precision."""
    draft.config.dtype = dtype
    draft.to(device="cpu", dtype=dtype).save_pretrained(folder)
    for path in sorted(start.folder.iterdir()):
        if TOKENIZER_FILES.fullmatch(path.name) and path.suffix in SMALL_FILE_SUFFIXES:
            shutil.copyfile(path, folder / path.name)


def _record(config: DistillConfig, run: GenerateConfig, examples: Examples, trainer: DraftTrainer) -> None:
    history = trainer.state.log_history
    before = next(entry["eval_acceptance"] for entry in history if "eval_acceptance" in entry)
    after = trainer.state.best_metric
    if after <= before:
        logger.warning("the new draft is not accepted more often than --draft as it was: train on more rows")
    record = {
        "new_draft": config.new_draft,
        "start": run.draft,
        "target": run.target,
        "options": vars(config),
        "num_training_sequences": len(examples.training),
        "num_prompts": len(examples.prompts),
        "num_held_out_sequences": len(examples.held_out),
        "acceptance_before": before,
        "acceptance_after": after,
        "steps": trainer.state.best_global_step,
        "history": history,
    }
    write_json(Path(config.new_draft) / RECORD_NAME, record)
