"""A draft in training, and what it learns from: a causal language model on one device.

B sequences, M positions before tokens of completions, C their columns, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdist.job.models.model_plan import ModelPlan
from specdist.models.files.checkpoint import SMALL_FILE_SUFFIXES, Checkpoint
from specdist.models.files.damage import reading
from specdist.models.quantized.quantized import quantization_of
from specdist.sampling.distributions import SamplingSettings
from specdist.training.drafts.acceptance import acceptances, needs_target
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.data import Batch
from specdist.training.drafts.losses import distribution_loss, token_loss, top_loss
from specdist.utils.errors import UserError

# Those of a tokenizer are copied; these are the model's, and are written with it.
TOKENIZER_FILES = re.compile(r"(token|vocab|merges|special|added|chat_template|spiece).*")


class Student:
    """A draft in training on one device, with all that its teacher needs."""

    def __init__(
        self,
        config: DistillConfig,
        models: ModelPlan,
        start: Checkpoint,
        settings: SamplingSettings,
        device: torch.device,
    ) -> None:
        """``start``: the draft to begin with, or the target, whose first ``--layers`` are taken."""
        self._start, self._settings, self._device = start, settings, device
        self._teacher_kind, self._loss = config.resolved_teacher, config.resolved_loss
        self.vocab_size = models.vocab_size
        num_layers = config.layers
        self._model = first_layers(start, num_layers) if num_layers else load_plain(start, torch.float32)
        self._model.to(device).train()
        self._dtype = start.torch_dtype(config.dtype)
        self._teacher: PreTrainedModel | None = None
        if self._teacher_kind == "target" or (needs_target(settings) and self._teacher_kind == "tokens"):
            self._teacher = load_teacher(models.target, config.dtype, device)
        is_bfloat16 = config.precision == "bfloat16" or (
            config.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        self._autocast = torch.bfloat16 if is_bfloat16 else None

    @property
    def module(self) -> PreTrainedModel:
        """What is trained."""
        return self._model

    @property
    def hidden_size(self) -> int:
        """Width of the draft, which decides the learning rate."""
        return int(self._model.config.get_text_config().hidden_size)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """A sum over the completions' tokens, with gradients."""
        logits_MV = self._logits(batch)
        if self._teacher_kind == "tokens":
            return token_loss(logits_MV, batch.places.token_ids_M)
        if self._teacher_kind == "recorded":
            assert batch.top_ids_MK is not None and batch.top_logs_MK is not None
            return top_loss(self._loss, logits_MV, batch.top_ids_MK, batch.top_logs_MK)
        target_MV = self._target_logits(batch)
        assert target_MV is not None
        return distribution_loss(self._loss, logits_MV, target_MV.log_softmax(-1))

    @torch.no_grad()
    def acceptances(self, batch: Batch) -> Sequence[np.ndarray]:
        """Of every completion the probability that the engine accepts the draft's token, at each of its
        places: see :mod:`specdist.training.drafts.acceptance`."""
        target_MV = self._target_logits(batch) if needs_target(self._settings) else None
        found_M = acceptances(self._logits(batch), batch.places, self._settings, target_MV)
        return np.split(found_M.cpu().numpy(), np.cumsum(batch.lengths)[:-1])

    def save(self, folder: Path) -> None:
        """Write the folder that ``--draft`` takes: with the tokenizer of what it began with, and weights in
        that model's own precision."""
        model = copy.deepcopy(self._model).to(device="cpu", dtype=self._dtype)
        model.config.dtype = self._dtype
        model.save_pretrained(folder)
        for path in sorted(self._start.folder.iterdir()):
            if TOKENIZER_FILES.fullmatch(path.name) and path.suffix in SMALL_FILE_SUFFIXES:
                shutil.copyfile(path, folder / path.name)

    def _logits(self, batch: Batch) -> Tensor:
        autocast = (
            contextlib.nullcontext()
            if self._autocast is None
            else torch.autocast(self._device.type, dtype=self._autocast)
        )
        with autocast:
            return self._at_places(self._model, batch)

    @torch.no_grad()
    def _target_logits(self, batch: Batch) -> Tensor | None:
        return None if self._teacher is None else self._at_places(self._teacher, batch).float()

    def _at_places(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Logits [M, V] of the ids that both models have; the output head runs at the columns of
        completions alone."""
        columns_C = batch.columns_M.unique()
        logits_BCV = model(batch.token_ids_BL, use_cache=False, logits_to_keep=columns_C).logits
        places_M = torch.searchsorted(columns_C, batch.columns_M)
        return logits_BCV[batch.rows_M, places_M, : self.vocab_size]


def first_layers(target: Checkpoint, num_layers: int) -> PreTrainedModel:
    """The target's embedding, first layers, last norm and output head as a model of its own.

    Raises :class:`UserError` if the target has no more layers.
    """
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if num_layers >= text.num_hidden_layers:
        raise UserError(
            f"--layers {num_layers} must be less than the {text.num_hidden_layers} layers of --target "
            f"{target.name}"
        )
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return load_plain(dataclasses.replace(target, config=config), torch.float32)


def load_plain(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers runs it, for training. Raises :class:`UserError`."""
    if quantization_of(checkpoint) is not None:
        raise UserError(
            f"{checkpoint.option} {checkpoint.name} is quantised, and only a plain model can be trained, "
            "or loaded as a teacher here: name the folder of the plain model; --teacher recorded needs no "
            "target"
        )
    with reading(f"{checkpoint.option} {checkpoint.name}"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=copy.deepcopy(checkpoint.config),
            dtype=dtype,
            trust_remote_code=checkpoint.trusts_code,
            use_safetensors=not checkpoint.is_pickled,
        )
    return model


def load_teacher(target: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    """The whole target, in the run's precision."""
    model = load_plain(target, target.torch_dtype(dtype)).to(device).eval()
    return model.requires_grad_(False)
