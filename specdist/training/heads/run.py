"""The training job, from a finished collection to a head with its figures: Adam with cosine decay, over
batches of whole prompts, and an evaluation after every epoch.

A label is a probability: of being accepted, or 0 or 1. One in between stands for both outcomes in these
shares, so that no outcome needs to be drawn.

M examples of a batch, H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tqdm
from torch import Tensor

from specdist.job.ranks.topology import local_device
from specdist.models.heads.examples import FEATURES
from specdist.models.heads.head import TokenHead, save_weights
from specdist.models.heads.info import INFO_NAME, HeadInfo
from specdist.training.heads.config import TrainConfig
from specdist.training.heads.data import ExampleSet, open_examples, split_rows
from specdist.utils.errors import UserError

EVALUATED_ROWS = 64
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


def binary_kl(logits_M: np.ndarray, labels_M: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of estimates from labels, in nats (SpecDec++, appendix D.3)."""
    labels_M, logits_M = labels_M.astype(float), logits_M.astype(float)
    losses_M = labels_M * np.logaddexp(0, -logits_M) + (1 - labels_M) * np.logaddexp(0, logits_M)
    return float((losses_M - _entropy(labels_M) - _entropy(1 - labels_M)).mean())


def _entropy(probabilities_M: np.ndarray) -> np.ndarray:
    """-p log p, 0 at p = 0."""
    positive_M = np.where(probabilities_M > 0, probabilities_M, 1.0)
    return -probabilities_M * np.log(positive_M)


def sigmoid(logits_M: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits_M.astype(float)))


def area_under_curve(scores_M: np.ndarray, labels_M: np.ndarray) -> float | None:
    """Area under the ROC curve: the probability that an accepted example has a larger score than a rejected
    one, ties counted half; None if one outcome never occurs."""
    labels_M = labels_M.astype(float)
    order = np.argsort(-scores_M, kind="stable")
    # Examples with one score are called positive together.
    ends = np.append(np.flatnonzero(np.diff(scores_M[order])), len(order) - 1)
    positives, negatives = (
        np.append(0.0, weights_M[order].cumsum()[ends]) for weights_M in (labels_M, 1 - labels_M)
    )
    heights = (positives[1:] + positives[:-1]) / 2
    whole = float(positives[-1] * negatives[-1])
    return float(np.diff(negatives) @ heights) / whole if whole else None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The labels [M] of examples, and the weights of the two outcomes in the loss."""

    labels: Callable[[ExampleSet], np.ndarray]
    accepted_weight: float = 1.0
    rejected_weight: float = 1.0

    def loss(self, logits_M: Tensor, labels_M: Tensor) -> Tensor:
        """Mean weighted binary cross entropy (SpecDec++, section 4.4)."""
        accepted_M = self.accepted_weight * labels_M * F.softplus(-logits_M)
        return (accepted_M + self.rejected_weight * (1 - labels_M) * F.softplus(logits_M)).mean()

    def mean_loss(self, logits_M: np.ndarray, labels_M: np.ndarray) -> float:
        return float(self.loss(torch.from_numpy(logits_M).double(), torch.from_numpy(labels_M).double()))


@dataclass
class History:
    """Mean losses of every epoch: of its training batches, and after it of the held-out rows."""

    training: list[float] = field(default_factory=list)
    evaluation: list[float] = field(default_factory=list)

    @property
    def num_since_best(self) -> int:
        """Epochs after the best one."""
        return len(self.evaluation) - 1 - int(np.argmin(self.evaluation))


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """The same random numbers and sums every time on one machine."""
    # Without it cuBLAS may add up in a different order in each call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)


def train_head(
    head: TokenHead, training: ExampleSet, evaluation: ExampleSet, objective: Objective, config: TrainConfig
) -> History:
    """Train in place. With a patience, the head gets the weights of its best epoch."""
    rate, num_epochs = config.pace(len(training), training.draft.hidden_size)
    num_steps = num_epochs * -(-len(training) // config.batch_size)
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    history, best = History(), copy.deepcopy(head.state_dict())
    generator, labels_M = np.random.default_rng(config.seed), objective.labels(evaluation)
    bar = tqdm.trange(num_epochs, unit="epoch", disable=None)
    for _ in bar:
        order = generator.permutation(len(training))
        losses: list[float] = []
        for begin in range(0, len(order), config.batch_size):
            # Sorted, so that files are read in order.
            batch = training.select(np.sort(order[begin : begin + config.batch_size]))
            losses.append(_step(head, optimizer, objective, batch))
            cosine.step()
        history.training.append(float(np.mean(losses)))
        history.evaluation.append(objective.mean_loss(estimate(head, evaluation), labels_M))
        bar.set_postfix(training=history.training[-1], held_out=history.evaluation[-1])
        if history.num_since_best == 0:
            best = copy.deepcopy(head.state_dict())
        if config.patience is not None and history.num_since_best >= config.patience:
            break
    if config.patience is not None:
        head.load_state_dict(best)
    return history


@torch.inference_mode()
def estimate(head: TokenHead, examples: ExampleSet) -> np.ndarray:
    """Logits [M] of all examples."""
    device = head.output.weight.device
    logits = [
        head(*_inputs(examples, slice(begin, begin + EVALUATED_ROWS), device)).cpu().numpy()
        for begin in range(0, len(examples), EVALUATED_ROWS)
    ]
    return np.concatenate(logits)


def _step(
    head: TokenHead, optimizer: torch.optim.Optimizer, objective: Objective, batch: ExampleSet
) -> float:
    device = head.output.weight.device
    labels_M = torch.from_numpy(objective.labels(batch).astype(np.float32)).to(device)
    loss = objective.loss(head(*_inputs(batch, slice(None), device)), labels_M)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _inputs(examples: ExampleSet, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states, float32 [M, H], and features [3, M]."""
    features_3M = np.stack([examples.column(name, rows) for name in FEATURES])
    hidden_MH = torch.from_numpy(examples.hidden_states(rows)).to(device)
    return hidden_MH.float(), torch.from_numpy(features_3M).to(device)
