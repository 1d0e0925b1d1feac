"""Training a head: Adam with cosine decay over batches of whole prompts, evaluated after every epoch.

M examples of a batch, H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
import tqdm
from torch import Tensor

from specdist.models.heads.examples import FEATURES
from specdist.models.heads.head import TokenHead
from specdist.training.heads.config import TrainConfig
from specdist.training.heads.data import ExampleSet

EVALUATED_ROWS = 64


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
