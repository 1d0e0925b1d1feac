"""Drafters whose vocabulary may be a part of the target's: all other tokens have no probability.

N tokens, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The logit of a token that the draft does not know: finite, for entropies, and without any probability at
# every temperature.
UNKNOWN_LOGIT = -1e30


class OwnVocabularyModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """``d2t`` holds, for every id of the draft, how far the target's id lies above it; ``t2d``, for every id
    of the target, whether the draft has it. The model has ``embed_tokens`` of the target's vocabulary, and an
    ``lm_head`` of its own."""

    base_model_prefix = ""
    d2t: Tensor
    t2d: Tensor

    def register_vocabulary(self, num_own: int) -> None:
        """The first ids, until others are read."""
        self.register_buffer("d2t", torch.zeros(num_own, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < num_own)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    @property
    def known_ids(self) -> Tensor:
        """int64 [v]: the target's ids of the draft's vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def know(self, token_ids: Tensor) -> None:
        """Let the vocabulary be these ids of the target [v], ascending."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.fill_(False)
        self.t2d[token_ids] = True

    def estimates(self, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor | None:
        """float32 [N]: of a confidence head, if there is one, for places with these states, after these
        tokens."""
        del hidden_NE, token_ids_N
        return None

    def whole_logits(self, own_Nv: Tensor) -> Tensor:
        """float32 [N, V]: over the target's vocabulary."""
        own_Nv = own_Nv.float()
        whole_NV = own_Nv.new_full((len(own_Nv), self.config.vocab_size), UNKNOWN_LOGIT)
        return whole_NV.index_copy_(1, self.known_ids, own_Nv)
