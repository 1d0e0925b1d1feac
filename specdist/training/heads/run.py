"""The training job: from a finished collection to a head with its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specdist.job.ranks.topology import local_device
from specdist.models.heads.head import TokenHead, save_weights
from specdist.models.heads.info import INFO_NAME, HeadInfo
from specdist.training.heads.config import TrainConfig
from specdist.training.heads.data import ExampleSet, open_examples, split_rows
from specdist.training.heads.metrics import area_under_curve, binary_kl, sigmoid
from specdist.training.heads.optimize import Objective, estimate, reproducible, train_head
from specdist.utils.errors import UserError

# The draft's own features as scores, with the sign that makes larger better.
BASELINES = {"entropy": -1, "top_probability": 1, "probability": 1}


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
    examples = open_examples(config.data, config.kind)
    training, evaluation = split_rows(examples, config.validation_share, config.seed)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / INFO_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error}") from error
    hidden_size = training.draft.hidden_size
    with reproducible(config.seed):
        head = TokenHead(
            hidden_size,
            config.depth or 0,
            uses_features=config.uses_features,
            hidden_state=training.hidden_state,
        ).to(local_device(config.device))
        history = train_head(head, training, evaluation, objective_of(config), config)
    rate, epochs = config.pace(len(training), hidden_size)
    info = HeadInfo(
        kind=config.kind,
        depth=len(head.residuals),
        hidden_size=hidden_size,
        draft=training.draft,
        weights_sha256=save_weights(head, output),
        max_ratio=config.max_ratio,
        uses_features=config.uses_features,
        hidden_state=training.hidden_state,
        data={"training": training.description(), "evaluation": evaluation.description()},
        options=config.training_options() | {"learning_rate": rate, "epochs": epochs},
        metrics=head_metrics(config, head, training, evaluation) | {"history": vars(history)},
    )
    info.write(output)
    return info


def objective_of(config: TrainConfig) -> Objective:
    """SpecDec++'s labels min(1, P/Q), or SPRINTER's: 1 where Q/P is at most ``max_ratio``."""
    if config.kind == "acceptance":
        assert config.accepted_weight is not None and config.rejected_weight is not None
        return Objective(
            labels=lambda examples: examples.column("acceptance"),
            accepted_weight=config.accepted_weight,
            rejected_weight=config.rejected_weight,
        )
    assert config.max_ratio is not None
    max_ratio = config.max_ratio
    return Objective(labels=lambda examples: (examples.column("ratio") <= max_ratio).astype(np.float32))


def head_metrics(
    config: TrainConfig, head: TokenHead, training: ExampleSet, evaluation: ExampleSet
) -> dict[str, Any]:
    """Figures for the head's file, on the held-out rows unless their name says training."""
    objective = objective_of(config)
    training_logits_M, training_labels_M = estimate(head, training), objective.labels(training)
    logits_M, labels_M = estimate(head, evaluation), objective.labels(evaluation).astype(float)
    return {
        "num_training_examples": len(training_logits_M),
        "num_examples": len(logits_M),
        "mean_label": float(labels_M.mean()),
        "mean_estimate": float(sigmoid(logits_M).mean()),
        "training_loss": objective.mean_loss(training_logits_M, training_labels_M),
        "loss": objective.mean_loss(logits_M, labels_M),
        "kl": binary_kl(logits_M, labels_M),
        "auc": area_under_curve(logits_M, labels_M),
        "baseline_auc": {
            name: area_under_curve(sign * evaluation.column(name), labels_M)
            for name, sign in BASELINES.items()
        },
    }
