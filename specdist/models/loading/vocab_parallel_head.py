"""The output head of a sharded target: every rank computes the logits of its part of the vocabulary.

DeepSpeed's own head splits the sum over the hidden units, and all-reduces logits of the whole vocabulary. Its
vocabulary-parallel head is for training: the inference configuration refuses ``vocab_parallel_lm_head``, and
on the meta device it would always be tied to the embedding.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from specdist.utils.errors import UserError


class VocabParallelHead(nn.Linear):
    """The rows ``ids`` of a head, weight and bias. Padding ids after the vocabulary are on no rank."""

    def __init__(self, whole: nn.Linear, ids: range) -> None:
        super().__init__(
            whole.in_features, len(ids), bias=whole.bias is not None, device="meta", dtype=whole.weight.dtype
        )
        self.ids = ids

    @torch.no_grad()
    def _tp_partition(self, parameters: list[nn.Parameter | None]) -> None:
        """Cut a stored weight or bias in place, as DeepSpeed's layers do under this name."""
        for parameter in parameters:
            if parameter is not None:
                parameter.data = parameter.data[self.ids.start : self.ids.stop]


def find_head(model: PreTrainedModel) -> tuple[str, nn.Module | None]:
    """The output head of a whole model, and its name there (empty where it has none)."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), ""), head


def shard_head(model: PreTrainedModel, name: str, whole: nn.Module | None, ids: range) -> None:
    """Put this rank's part of the head, on the meta device, into the model that DeepSpeed has sharded.

    Raises :class:`UserError` if the whole head is not a plain linear layer.
    """
    if type(whole) is not nn.Linear:
        raise UserError(
            f"--target {model.name_or_path or model.config.model_type}: its output head is a "
            f"{type(whole).__name__}, which cannot be cut along the vocabulary: use --tp_size 1"
        )
    model.set_submodule(name, VocabParallelHead(whole, ids))
