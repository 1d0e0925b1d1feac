"""Target and draft, loaded once: transformers and specdist run the very same weights in turn."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdist.job.tokens import check_same_tokenizer, common_vocab_size, load_tokenizer
from specdist.models.adapters import use_paged_attention, use_transformers_attention
from specdist.models.checkpoint import Checkpoint, check_family, open_checkpoint
from specdist.models.loading import load_whole
from specdist.utils.errors import UserError


class Pair:
    """Both models on one device. Raises :class:`UserError` for a pair that specdist would refuse."""

    def __init__(
        self,
        target: str,
        draft: str,
        *,
        dtype: str,
        device: torch.device,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        # Every call of generate() would repeat its remarks on the options.
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.target_checkpoint, self.draft_checkpoint = (
            open_checkpoint(option, name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
            for option, name in (("--target", target), ("--draft", draft))
        )
        for checkpoint in (self.target_checkpoint, self.draft_checkpoint):
            check_family(checkpoint, 1)
        check_same_tokenizer(self.target_checkpoint, self.draft_checkpoint)
        self.vocab_size = common_vocab_size(self.target_checkpoint, self.draft_checkpoint)
        self.stop_token_ids = self.target_checkpoint.stop_token_ids()
        self.device = device
        self.target = _load(self.target_checkpoint, dtype, device)
        self.draft = _load(self.draft_checkpoint, dtype, device)
        self.tokenizer = load_tokenizer(self.target_checkpoint)

    @property
    def dtype(self) -> str:
        """Of the target's weights, as options spell it."""
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def max_positions(self) -> int:
        """Longest prompt plus completion."""
        return min(self.target_checkpoint.max_positions, self.draft_checkpoint.max_positions)

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
