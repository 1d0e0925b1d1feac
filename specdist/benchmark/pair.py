"""Target and draft, loaded once: transformers and specdist run the very same weights in turn."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdist.api.llm import NO_PATH
from specdist.config.generate import GenerateConfig
from specdist.job.preflight import plan_models
from specdist.job.tokens import load_tokenizer
from specdist.models.adapters import use_paged_attention, use_transformers_attention
from specdist.models.checkpoint import Checkpoint
from specdist.models.loading import load_whole
from specdist.utils.errors import UserError


class Pair:
    """Both models on one device. Raises :class:`UserError` for a pair that the job would refuse.

    Args:
        options: more of the job's: ``dtype``, ``trust_remote_code``, ``allow_pickle``.
    """

    def __init__(self, target: str, draft: str, *, device: torch.device, **options: Any) -> None:
        # Every call of generate() would repeat its remarks on the options.
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        config = GenerateConfig(prompts=NO_PATH, output=NO_PATH, target=target, draft=draft, **options)
        models = plan_models(config)
        assert models.draft is not None
        self.target_checkpoint, self.draft_checkpoint = models.target, models.draft
        self.vocab_size = models.vocab_size
        # Longest prompt plus completion.
        self.max_positions = models.max_seq_len
        self.stop_token_ids = self.target_checkpoint.stop_token_ids()
        self.device = device
        self.target = _load(self.target_checkpoint, config.dtype, device)
        self.draft = _load(self.draft_checkpoint, config.dtype, device)
        self.tokenizer = load_tokenizer(self.target_checkpoint)

    @property
    def dtype(self) -> str:
        """Of the target's weights, as options spell it."""
        return str(self.target.dtype).removeprefix("torch.")

    def use_specdist_attention(self) -> None:
        """Make the models run in specdist's engine."""
        for model in (self.target, self.draft):
            use_paged_attention(model)

    def use_transformers_attention(self) -> None:
        """Make the models run in transformers, with the attention that it would choose."""
        for model in (self.target, self.draft):
            use_transformers_attention(model)

    def tokenizers_for_assistance(self) -> dict[str, object]:
        """transformers takes logits of different widths for different tokenizers, and wants to have them."""
        if self.target_checkpoint.vocab_width == self.draft_checkpoint.vocab_width:
            return {}
        return {"tokenizer": self.tokenizer, "assistant_tokenizer": load_tokenizer(self.draft_checkpoint)}


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    try:
        model = load_whole(checkpoint, dtype=checkpoint.torch_dtype(dtype), device=device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{checkpoint.option} {checkpoint.name} does not fit on {device}: {error}") from error
    # A checkpoint's own sampling settings would be added to those of the benchmark.
    model.generation_config = GenerationConfig()
    return model
