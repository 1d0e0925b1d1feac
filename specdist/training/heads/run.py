"""The training job: from a finished collection to a head with its figures and plots."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdist.job.ranks.topology import local_device
from specdist.models.heads.head import TokenHead, save_weights
from specdist.models.heads.info import INFO_NAME, HeadInfo
from specdist.training.heads.config import MAX_RATIOS, TrainConfig
from specdist.training.heads.data import ExampleSet, open_examples, split_rows
from specdist.training.heads.evaluate import Trained, baseline_curves, head_metrics
from specdist.training.heads.metrics import calibration, sigmoid
from specdist.training.heads.optimize import Objective, estimate, reproducible, train_head
from specdist.training.heads.plots import plot_calibration, plot_curves, plot_roc
from specdist.utils.errors import UserError

logger = logging.getLogger(__name__)


def train_and_describe(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Run the job; no text, and the document to print. Raises :class:`UserError`."""
    info = run_training(config)
    metrics = {name: value for name, value in info.metrics.items() if name != "history"}
    return "", {"output": config.output, "kind": info.kind, **metrics}


def run_training(config: TrainConfig) -> HeadInfo:
    """Train a head and write all its files. Raises :class:`UserError` before any training."""
    output = Path(config.output)
    if (output / INFO_NAME).exists() and not config.overwrite:
        raise UserError(
            f"--output {output} already contains a head: use another folder, or --overwrite to replace it"
        )
    training, evaluation = _open(config)
    device = local_device(config.device)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / INFO_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error}") from error
    if config.kind == "acceptance":
        label = f"w_rej {config.rejected_weight:g}, D {config.depth}"
        trained = {label: _train(config, config.max_ratio, training, evaluation, device, label)}
    else:
        # SPRINTER's figure compares a verifier per ratio; only the wanted one is kept.
        assert config.max_ratio is not None
        ratios = sorted({*MAX_RATIOS, config.max_ratio})
        labels = {ratio: f"λ {ratio:g}" for ratio in ratios}
        trained = {
            labels[ratio]: _train(config, ratio, training, evaluation, device, labels[ratio])
            for ratio in ratios
        }
        label = labels[config.max_ratio]
    return _write(config, label, trained, training, evaluation)


def _open(config: TrainConfig) -> tuple[ExampleSet, ExampleSet]:
    """The examples for training and for evaluation."""
    examples = open_examples("--data", config.data, config.kind)
    if config.eval_data is None:
        assert config.validation_share is not None
        return split_rows(examples, config.validation_share, config.seed)
    evaluation = open_examples("--eval_data", config.eval_data, config.kind)
    if evaluation.draft.fingerprint != examples.draft.fingerprint:
        raise UserError(
            f"--eval_data {config.eval_data} was collected with the draft {evaluation.draft.name}, and "
            f"--data {config.data} with {examples.draft.name}: a head works with one draft only"
        )
    if evaluation.hidden_state != examples.hidden_state:
        raise UserError(
            f"--eval_data {config.eval_data} was collected with --hidden_state {evaluation.hidden_state}, "
            f"and --data {config.data} with {examples.hidden_state}: a head reads one of them"
        )
    return examples, evaluation


def _train(
    config: TrainConfig,
    max_ratio: float | None,
    training: ExampleSet,
    evaluation: ExampleSet,
    device: torch.device,
    label: str,
) -> Trained:
    objective = _objective(config, max_ratio)
    with reproducible(config.seed):
        head = TokenHead(
            training.draft.hidden_size,
            config.depth or 0,
            uses_features=config.uses_features,
            hidden_state=training.hidden_state,
        ).to(device)
        history = train_head(head, training, evaluation, objective, config, label=label)
    labels_M = objective.labels(evaluation, slice(None)).astype(float)
    return Trained(head, objective, history, estimate(head, evaluation), labels_M)


def _objective(config: TrainConfig, max_ratio: float | None) -> Objective:
    """SpecDec++'s labels min(1, P/Q), or SPRINTER's: 1 where Q/P is at most ``max_ratio``."""
    if config.kind == "acceptance":
        assert config.accepted_weight is not None and config.rejected_weight is not None
        return Objective(
            labels=lambda examples, rows: examples.column("acceptance", rows),
            accepted_weight=config.accepted_weight,
            rejected_weight=config.rejected_weight,
        )
    return Objective(
        labels=lambda examples, rows: (examples.column("ratio", rows) <= max_ratio).astype(np.float32)
    )


def _write(
    config: TrainConfig, label: str, trained: dict[str, Trained], training: ExampleSet, evaluation: ExampleSet
) -> HeadInfo:
    output = Path(config.output)
    kept = trained[label]
    # One per verifier; for an acceptance head, its own and those of the draft's features.
    curves = {name: each.curve for name, each in trained.items()}
    if config.kind == "acceptance":
        curves |= baseline_curves(evaluation, kept.labels_M)
    plot_curves({f"{name}, " if len(trained) > 1 else "": each.history for name, each in trained.items()},
                output / "curves.png")  # fmt: skip
    plot_calibration(calibration(sigmoid(kept.logits_M), kept.labels_M), label, output / "calibration.png")
    plot_roc(curves, output / "roc.png")
    metrics = head_metrics(config.kind, kept, training, evaluation)
    if config.kind == "verifier":
        metrics["auc_per_max_ratio"] = {name: curves[name].auc for name in trained}
    info = HeadInfo(
        kind=config.kind,
        depth=len(kept.head.residuals),
        hidden_size=training.draft.hidden_size,
        draft=training.draft,
        weights_sha256=save_weights(kept.head, output),
        max_ratio=config.max_ratio,
        uses_features=config.uses_features,
        hidden_state=training.hidden_state,
        data={"training": training.description(), "evaluation": evaluation.description()},
        options=config.training_options() | asdict(config.pace(len(training), training.draft.hidden_size)),
        metrics=metrics | {"history": vars(kept.history)},
    )
    info.write(output)
    return info
