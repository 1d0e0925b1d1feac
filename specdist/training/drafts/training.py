"""Training a draft: AdamW over sequences, on all ranks at a time, until the predicted speed-up stands still.

All ranks hold the same weights and the same examples. A step's sequences are dealt to the ranks, whose
gradients are added up: the result is that of one rank, up to rounding. After every evaluation rank 0 writes a
checkpoint, with which an interrupted training goes on as if nothing had happened; and the draft itself, as it
is then, goes on with the prompts of the steps until the next one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdist.data.store.files import write_atomically
from specdist.job.ranks.topology import Topology, broadcast_from_rank0, gathered
from specdist.training.drafts.acceptance import Prospect, prospect
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.data import Example, Examples, batches, num_completion_tokens
from specdist.training.drafts.own_texts import Writer, with_own_texts
from specdist.training.drafts.student import Student
from specdist.training.loop import evaluated_steps, run_steps
from specdist.utils.errors import UserError

CHECKPOINT_NAME = "checkpoint.pt"
WARM_UP_SHARE, LAST_SHARE, MAX_NORM = 0.03, 0.02, 1.0
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01

logger = logging.getLogger(__name__)


@dataclass
class History:
    """By evaluation: steps taken, mean loss of the training since the last one, what the draft promises, and
    the seconds of training and the tokens that the draft has written for it until then. The first is before
    any step."""

    steps: list[int] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    prospects: list[Prospect] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_own_tokens: list[int] = field(default_factory=list)

    @property
    def best(self) -> int:
        """The latest evaluation whose predicted speed-up is not below the highest by more than the standard
        error of their difference, completion by completion: of few completions the highest is chance, and
        training has gone on since."""
        highest = max(self.prospects, key=lambda found: found.speed_up)
        return max(
            index
            for index, found in enumerate(self.prospects)
            if highest.speed_up - found.speed_up <= highest.error_beside(found)
        )

    def is_over(self, patience: int) -> bool:
        """Whether so many evaluations have not raised it."""
        return len(self.prospects) - 1 - self.best >= patience

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self) -> dict[str, Any]:
        """The same for people."""
        return self.to_json() | {"prospects": [found.figures() for found in self.prospects]}

    @staticmethod
    def from_json(values: dict[str, Any]) -> History:
        found = History(**values)
        found.prospects = [Prospect(**each) for each in values["prospects"]]
        return found


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what. ``writer``: the student, if it goes on with the prompts. ``key``: of a
    checkpoint that may be resumed."""

    config: DistillConfig
    examples: Examples
    topology: Topology
    cost_ratio: float
    key: str
    writer: Writer | None = None


class Trainer:
    """Trains the student in place."""

    def __init__(self, task: Task, student: Student, folder: Path) -> None:
        config = task.config
        self._task, self._student = task, student
        self._path = folder / CHECKPOINT_NAME
        self._weights = [each for each in student.module.parameters() if each.requires_grad]
        self._rate = config.rate(student.hidden_size)
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=self._rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self._learned = task.examples.learned
        self._steps_per_epoch = -(-len(self._learned) // config.batch_size)
        num_epochs = config.num_epochs(len(self._learned))
        self._num_steps = num_epochs * self._steps_per_epoch
        self._evaluated = evaluated_steps(self._steps_per_epoch, num_epochs)
        self._history = History()
        self._best: dict[str, torch.Tensor] = {}
        self._step = 0
        self._num_own_tokens = 0
        self._begin = time.monotonic()
        self._resume()
        # By place in what is learned; until a step, which is evaluated.
        self._texts: dict[int, Example] = {}
        self._texts_end = self._step

    def run(self, is_stopped: Callable[[], bool]) -> History | None:
        """The student gets the weights of its best evaluation. None if it was stopped before the end, which
        the same call continues."""
        history, config = self._history, self._task.config
        if not history.steps:
            self._evaluate(0, None)
        is_complete = run_steps(
            self._step, self._num_steps, self._train_step, self._evaluate,
            evaluated=self._evaluated,
            is_over=lambda: history.is_over(config.patience),
            # Ranks look at different moments: rank 0's look counts.
            is_stopped=lambda: broadcast_from_rank0(self._task.topology, is_stopped()),
            label="distilling",
            is_shown=self._task.topology.is_rank0,
        )  # fmt: skip
        if not is_complete:
            return None
        self._student.module.load_state_dict(self._best)
        return history

    def _train_step(self, step: int) -> float:
        """The loss of a step's tokens, in nats per token."""
        config, topology = self._task.config, self._task.topology
        if step == self._texts_end:
            self._write_texts()
        chosen = [self._texts.get(index, self._learned[index]) for index in self._chosen(self._step)]
        num_tokens = num_completion_tokens(chosen)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * self._scale()
        self._student.module.train()
        self._optimizer.zero_grad(set_to_none=False)
        total = 0.0
        mine = chosen[topology.rank :: topology.world_size]
        for _, batch in batches(mine, config.tokens_per_pass, config, topology.device):
            loss = self._student.loss(batch) / num_tokens
            loss.backward()
            total += float(loss.detach())
        self._add_up_gradients()
        torch.nn.utils.clip_grad_norm_(self._weights, MAX_NORM)
        self._optimizer.step()
        self._step += 1
        return sum(gathered(topology, total))

    def _chosen(self, step: int) -> list[int]:
        """Places of a step's sequences: those of every epoch in an order of its own."""
        size = self._task.config.batch_size
        epoch, place = divmod(step, self._steps_per_epoch)
        order = np.random.default_rng([self._task.config.seed, epoch]).permutation(len(self._learned))
        chosen: list[int] = order[place * size : (place + 1) * size].tolist()
        return chosen

    def _write_texts(self) -> None:
        """After the prompts of the steps until the next evaluation. A training that goes on does so after
        one, with the same weights: nothing of the texts needs to be kept."""
        self._texts_end = min(step for step in self._evaluated if step > self._step)
        if self._task.writer is None:
            return
        first = len(self._learned) - len(self._task.examples.prompts)
        steps = range(self._step, self._texts_end)
        places = [index for step in steps for index in self._chosen(step) if index >= first]
        prompts = [self._learned[index] for index in places]
        texts = with_own_texts(self._task.writer, prompts, self._step)
        self._texts = dict(zip(places, texts, strict=True))
        self._num_own_tokens += num_completion_tokens(texts) - num_completion_tokens(prompts)

    def _scale(self) -> float:
        """Linear warm-up, then cosine decay over all epochs."""
        progress = self._step / self._num_steps
        warm_up = min(1.0, (self._step + 1) / max(1.0, WARM_UP_SHARE * self._num_steps))
        return warm_up * (LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))

    def _add_up_gradients(self) -> None:
        """Of all ranks, in one message."""
        for weight in self._weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if self._task.topology.world_size == 1:
            return
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat)
        begin = 0
        for gradient in gradients:
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()

    def _evaluate(self, step: int, loss: float | None) -> str:
        """Measure the draft, keep it if it is the best so far, and write a checkpoint."""
        history = self._history
        earlier = history.seconds[-1] if history.seconds else 0.0
        history.steps.append(step)
        history.losses.append(loss)
        history.prospects.append(held_out_prospect(self._task, self._student))
        history.seconds.append(earlier + time.monotonic() - self._begin)
        history.num_own_tokens.append(self._num_own_tokens)
        self._begin = time.monotonic()
        if history.best == len(history.prospects) - 1:
            state = self._student.module.state_dict()
            self._best = {name: value.detach().cpu().clone() for name, value in state.items()}
        found = history.prospects[-1]
        logger.info(
            "step %d of at most %d: acceptance %.3f, predicted speed-up %.2f",
            self._step, self._num_steps, found.acceptance, found.speed_up,
        )  # fmt: skip
        if self._task.topology.is_rank0:
            self._write()
        return f"acceptance={found.acceptance:.3f}"

    def _write(self) -> None:
        document = {
            "key": self._task.key,
            "step": self._step,
            "weights": self._student.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "best": self._best,
            "history": self._history.to_json(),
        }
        write_atomically(self._path, lambda file: torch.save(document, file))

    def _resume(self) -> None:
        """From the checkpoint, if there is one of this task. All ranks read the same file."""
        if not broadcast_from_rank0(self._task.topology, self._path.is_file()):
            return
        try:
            found = torch.load(self._path, map_location=self._task.topology.device, weights_only=True)
        except Exception as error:  # torch and pickle raise anything for a damaged file
            raise UserError(f"{self._path} cannot be read ({error}): delete it to train afresh") from error
        if found["key"] != self._task.key:
            raise UserError(
                f"{self._path} is of another version, or of a training with other options, models or rows: "
                "use another --new_draft, or delete that file to train afresh"
            )
        self._student.module.load_state_dict(found["weights"])
        self._optimizer.load_state_dict(found["optimizer"])
        self._best = {name: value.cpu() for name, value in found["best"].items()}
        self._history = History.from_json(found["history"])
        self._num_own_tokens = self._history.num_own_tokens[-1]
        self._step = found["step"]
        logger.info("going on after step %d", self._step)


def held_out_prospect(task: Task, student: Student) -> Prospect:
    """What the draft promises on the rows kept for evaluations, which are dealt to the ranks."""
    held_out, topology = task.examples.held_out, task.topology
    mine = range(topology.rank, len(held_out), topology.world_size)
    own: dict[int, np.ndarray] = {}
    was_training = student.module.training
    student.module.eval()
    chosen = [held_out[index] for index in mine]
    for indices, batch in batches(chosen, task.config.tokens_per_pass, task.config, topology.device):
        found = student.acceptances(batch)
        own |= {mine[index]: each for index, each in zip(indices, found, strict=True)}
    student.module.train(was_training)
    together: dict[int, np.ndarray] = {}
    for part in gathered(topology, own):
        together |= part
    return prospect([together[index] for index in range(len(held_out))], task.cost_ratio)
