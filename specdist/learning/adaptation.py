"""A draft that learns while a run goes on: a copy is trained in pieces, and replaces it where it is better.

The copy is float32, with AdamW on the target's own tokens.
After some steps copy and draft are compared on the latest rows, which neither was trained on, by the engine's
rule: how many of the target's tokens each would have drafted. Input embeddings learn only where they are the
output head, too.

T tokens of a chunk, M positions before tokens of a completion, E hidden size, V vocabulary, F weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.learning.acceptance import Places, acceptances
from specdist.learning.losses import token_loss
from specdist.learning.optimizer import RangedAdamW
from specdist.learning.pieces import Pieces, PiecewiseModel, largest_difference
from specdist.learning.rows import FinishedRow, RowBuffer
from specdist.sampling.distributions import SamplingSettings, distributions_from_logits
from specdist.stats.learning import Learned
from specdist.utils.errors import UserError

# As in jobs/distill.py.
MAX_NORM = 1.0
WARM_UP_STEPS = 10
# Tokens of a chunk, and weights of a piece of the optimizer's step, to begin with; and how far they go.
CHUNK, LEAST_CHUNK, MOST_CHUNK = 32, 8, 256
WEIGHTS_PER_TOKEN = 2**11
NUM_LATEST, LEAST_ROWS = 16, 4
# Standard errors by which a copy must be better.
SURE = 2.0
# A copy that was worse so often in a row goes back to the draft, with half the rate.
PATIENCE = 4
# Bytes of a weight: the copy, its gradient and two moments.
BYTES_PER_WEIGHT = 16
NOTHING_TO_DO = "nothing to do"
# Pieces of all weights, whatever the size of a chunk.
REPLACING, GOING_BACK = "replacing the draft", "going back"
TOLERANCE = 1e-4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What to learn by, and how the run draws.

    Attributes:
        rate: of AdamW.
        batch_tokens: of completions, of a step.
        buffer_tokens: of rows that are kept.
        interval: steps between two comparisons.
        margin: by how much more of the tokens the copy must draft to replace the draft.
    """

    sampling: SamplingSettings
    vocab_size: int
    rate: float
    batch_tokens: int = 512
    buffer_tokens: int = 2**20
    interval: int = 16
    margin: float = 0.002
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Of a comparison, the tokens and the share of them that draft and copy would have drafted; the standard
    error of the difference, over rows."""

    num_tokens: int
    of_draft: float
    of_copy: float
    error: float

    def is_better(self, margin: float) -> bool:
        """Not by chance, and by the margin; a negative margin lets any copy pass whose numbers are finite."""
        return self.of_copy - self.of_draft > (margin if margin < 0 else max(margin, SURE * self.error))


@dataclass(frozen=True, kw_only=True)
class Served:
    """The draft that is at work. ``weights``: its parameters, by name; ``replace``: puts others into their
    place, between two passes."""

    weights: Mapping[str, Tensor]
    replace: Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A replacement, after so many steps of this start of the run."""

    num_steps: int
    judgement: Judgement


class Keeper(Protocol):
    """Keeps every draft that takes over."""

    def may_switch(self) -> bool: ...

    def on_switch(self, switch: Switch) -> None: ...


class Adaptation:
    """Learns by its :meth:`pieces`, from the rows that are put into ``rows``."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: AdaptSettings,
        served: Served,
        keeper: Keeper | None = None,
    ) -> None:
        """``model``: the copy, float32, on the draft's device. Raises :class:`UserError` for a family whose
        layers cannot be run one by one."""
        # Options of single rows are not known here: all are judged by the run's.
        sampling = dataclasses.replace(settings.sampling, processing=None)
        self._settings = dataclasses.replace(settings, sampling=sampling)
        self._served, self._keeper = served, keeper
        self.rows = RowBuffer(max_tokens=settings.buffer_tokens, num_latest=NUM_LATEST)
        self.learned = Learned()
        self.chunk = CHUNK
        self.last: Judgement | None = None
        self._random = np.random.default_rng(settings.seed)
        self._rate, self._num_steps, self._num_worse = settings.rate, 0, 0
        self._model, self._device = model.eval(), model.device
        self._check(model, settings.vocab_size)
        self._copy = PiecewiseModel(model)
        self._draft = PiecewiseModel(model, served.weights)
        self._trained = _trained(model)
        self._optimizer = self._side_by_side()
        is_half = self._device.type == "cuda" and torch.cuda.is_bf16_supported()
        self._precision: Callable[[], contextlib.AbstractContextManager[object]] = (
            partial(torch.autocast, "cuda", dtype=torch.bfloat16) if is_half else contextlib.nullcontext
        )

    def _check(self, model: PreTrainedModel, vocab_size: int) -> None:
        try:
            difference = largest_difference(model, vocab_size)
        except Exception as error:  # structures differ in more ways than can be foreseen
            raise UserError(_unknown(model, str(error))) from error
        if not difference <= TOLERANCE:
            raise UserError(_unknown(model, f"its logits differ by {difference:.2g} of the largest"))

    def pieces(self) -> Iterator[str]:
        """Without an end. Each says of what kind the next one is; ``NOTHING_TO_DO`` until there are rows."""
        while True:
            while self.rows.num_training < LEAST_ROWS:
                yield NOTHING_TO_DO
            for _ in range(self._settings.interval):
                yield from self._step()
            yield from self._judge()

    def _step(self) -> Pieces:
        num_tokens = 0
        while num_tokens < self._settings.batch_tokens:
            row = self.rows.draw(self._random)
            yield from self._learn(row)
            num_tokens += row.num_completion_tokens
        optimizer, rate = self._optimizer, self._rate * min(1.0, (self._num_steps + 1) / WARM_UP_STEPS)
        squares = []
        for begin, end in self._ranges():
            yield "norm of gradients"
            squares.append(optimizer.gradients_F[begin:end].square().sum())
        # Gradients are sums over tokens so far.
        norm = float(torch.stack(squares).sum().sqrt()) / num_tokens
        if not math.isfinite(norm):
            self._go_back()
            return
        scale = min(1.0, MAX_NORM / (norm + 1e-6)) / num_tokens
        optimizer.begin()
        for begin, end in self._ranges():
            yield "optimizer"
            optimizer.gradients_F[begin:end] *= scale
            optimizer.step(begin, end, rate)
        self._num_steps += 1
        self.learned.num_adapt_steps += 1

    def _learn(self, row: FinishedRow) -> Pieces:
        """Add a row's gradients."""
        ids_L, cache = self._ids(row), self._copy.new_cache()
        for begin, end in self._chunks(len(ids_L) - 1):
            chunk_T = ids_L[begin:end]
            first = max(begin, row.num_prompt_tokens - 1)
            if end <= first:
                yield from _within(self._precision, self._copy.forward(chunk_T, cache))
                continue
            losses = partial(self._losses, first - begin, ids_L[first + 1 : end + 1])
            yield from _within(self._precision, self._copy.train(chunk_T, cache, losses))

    def _losses(self, first: int, next_ids_M: Tensor, hidden_TE: Tensor) -> Iterator[Tensor]:
        """Cross entropy of the target's tokens, in parts: the output head is the largest product."""
        size = max(LEAST_CHUNK, self.chunk // 2)
        for hidden_ME, ids_M in zip(hidden_TE[first:].split(size), next_ids_M.split(size), strict=True):
            yield token_loss(self._copy.logits(hidden_ME)[:, : self._settings.vocab_size], ids_M)

    def _judge(self) -> Pieces:
        """Compare, and let the better one be the draft."""
        rows, found = self.rows.latest, []
        for row in rows:
            of_draft = yield from self._agreement(self._draft, row)
            of_copy = yield from self._agreement(self._copy, row)
            found.append((of_draft, of_copy))
        # Weights that have gone astray give no numbers: such a copy drafts nothing.
        sums_U2: np.ndarray
        sums_U2, counts_U = (
            np.nan_to_num(np.array(found)),
            np.array([row.num_completion_tokens for row in rows]),
        )
        num_tokens = int(counts_U.sum())
        of_draft, of_copy = (sums_U2.sum(0) / num_tokens).tolist()
        spread_U = sums_U2[:, 1] - sums_U2[:, 0] - (of_copy - of_draft) * counts_U
        error = math.sqrt(float((spread_U**2).sum())) / num_tokens
        judgement = Judgement(num_tokens=num_tokens, of_draft=of_draft, of_copy=of_copy, error=error)
        self.last = judgement
        learned = self.learned
        learned.num_adapt_judged += num_tokens
        learned.num_adapt_by_draft += round(of_draft * num_tokens)
        learned.num_adapt_by_copy += round(of_copy * num_tokens)
        if judgement.is_better(self._settings.margin):
            if self._keeper is not None and not self._keeper.may_switch():
                return
            yield REPLACING
            self._served.replace(self._weights())
            learned.num_adapt_switches += 1
            self._num_worse = 0
            if self._keeper is not None:
                self._keeper.on_switch(Switch(num_steps=self._num_steps, judgement=judgement))
        elif of_copy < of_draft - judgement.error:
            self._num_worse += 1
            if self._num_worse >= PATIENCE:
                yield GOING_BACK
                self._go_back()

    def _agreement(self, model: PiecewiseModel, row: FinishedRow) -> Pieces:
        """How many of a row's tokens this model would have drafted after those before them: of draws with the
        run's noise, or greedy ones, their number; else the sum of their probabilities."""
        ids_L, cache, total = self._ids(row), model.new_cache(), 0.0
        for begin, end in self._chunks(len(ids_L) - 1):
            hidden_TE = yield from model.forward(ids_L[begin:end], cache)
            first = max(begin, row.num_prompt_tokens - 1)
            for at in range(first, end, self.chunk):
                yield "judging"
                until = min(end, at + self.chunk)
                with torch.no_grad():
                    logits_MV = model.logits(hidden_TE[at - begin : until - begin])
                    total += self._drafted(logits_MV, ids_L[at + 1 : until + 1], at + 1, row)
        return total

    def _drafted(self, logits_MV: Tensor, ids_M: Tensor, position: int, row: FinishedRow) -> float:
        sampling, logits_MV = self._settings.sampling, logits_MV[:, : self._settings.vocab_size].float()
        if sampling.is_random:
            return float(distributions_from_logits(logits_MV, sampling).probabilities_of(ids_M).sum())
        places = Places(
            token_ids_M=ids_M,
            stream_keys_M=torch.full_like(ids_M, row.stream_key),
            positions_M=position + torch.arange(len(ids_M), device=self._device),
        )
        return float(acceptances(logits_MV, places, sampling).sum())

    def _ids(self, row: FinishedRow) -> Tensor:
        return torch.from_numpy(row.token_ids.astype(np.int64)).to(self._device)

    def _chunks(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        begin = 0
        while begin < num_tokens:
            end = min(num_tokens, begin + self.chunk)
            yield begin, end
            begin = end

    def _ranges(self) -> Iterator[tuple[int, int]]:
        size, num_weights = self.chunk * WEIGHTS_PER_TOKEN, len(self._optimizer.weights_F)
        return ((begin, min(num_weights, begin + size)) for begin in range(0, num_weights, size))

    def resize(self, factor: float) -> bool:
        """Make pieces larger or smaller from the next chunk on; whether they could be."""
        chunk = int(min(MOST_CHUNK, max(LEAST_CHUNK, self.chunk * factor)))
        self.chunk, before = chunk, self.chunk
        return chunk != before

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._trained.items()}

    @torch.no_grad()
    def _go_back(self) -> None:
        """The draft's own weights, and half the rate: what was learned has made it worse."""
        for name, weight in self._trained.items():
            weight.copy_(self._served.weights[name])
        self._optimizer = RangedAdamW(self._optimizer.weights_F, self._optimizer.gradients_F.zero_())
        self._rate, self._num_worse = self._rate / 2, 0
        logger.info("what the draft has learned has made it worse: back to the draft, learning rate halved")

    def _side_by_side(self) -> RangedAdamW:
        """Let the trained weights, and their gradients, be parts of one piece of memory each."""
        num_weights = sum(each.numel() for each in self._trained.values())
        weights_F = torch.empty(num_weights, device=self._device)
        gradients_F = torch.zeros_like(weights_F)
        begin = 0
        for weight in self._trained.values():
            end = begin + weight.numel()
            weights_F[begin:end] = weight.detach().flatten()
            weight.data = weights_F[begin:end].view_as(weight)
            weight.grad = gradients_F[begin:end].view_as(weight)
            begin = end
        return RangedAdamW(weights_F, gradients_F)


def copy_of(model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device) -> PreTrainedModel:
    """A float32 model with these weights that runs as transformers does, for training."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    attention = "sdpa" if model._supports_sdpa else "eager"
    found = type(model)._from_config(config, attn_implementation=attention, dtype=torch.float32).to(device)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            weight.copy_(weights[name])
    return found


def _trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """All weights but input embeddings that are not the output head, too; those need no gradients."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    found = {}
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight is not embeddings or weight is head)
        if weight.requires_grad:
            found[name] = weight
    return found


def _within(context: Callable[[], contextlib.AbstractContextManager[object]], pieces: Pieces) -> Pieces:
    """Each piece inside the context, which nothing else is in."""
    while True:
        with context():
            try:
                kind = next(pieces)
            except StopIteration as end:
                return end.value
        yield kind


def _unknown(model: PreTrainedModel, reason: str) -> str:
    return (
        f"--adapt_draft: a draft of the family {model.config.model_type} cannot be trained layer by layer "
        f"({reason}): leave it out, or train the draft before the run with jobs/distill.py"
    )
