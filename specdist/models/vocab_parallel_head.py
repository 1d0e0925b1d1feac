"""The output head of a sharded target: every rank computes the logits of its own slice of the vocabulary.

DeepSpeed's own head splits the sum over the hidden units and adds up logits of the whole vocabulary on every
rank. Its vocabulary-parallel one is for training: the inference configuration refuses
``vocab_parallel_lm_head``, and a head without memory would be tied to the embedding, whether it is or not.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from specdist.utils.errors import UserError


class VocabParallelHead(nn.Linear):
    """The rows ``ids`` of a head, weight and bias; padding ids after the vocabulary are nobody's."""

    def __init__(self, whole: nn.Linear, ids: range) -> None:
        super().__init__(
            whole.in_features,
            len(ids),
            bias=whole.bias is not None,
            device="meta",
            dtype=whole.weight.dtype,
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
    """Put this rank's slice of the head, without memory yet, into the model that DeepSpeed has sharded.

    Raises :class:`UserError` where the whole head was not a plain linear layer.
    """
    if type(whole) is not nn.Linear:
        raise UserError(
            f"--target {model.name_or_path or model.config.model_type}: its output head is a "
            f"{type(whole).__name__}, which cannot be cut along the vocabulary: use --tp_size 1"
        )
    model.set_submodule(name, VocabParallelHead(whole, ids))
