"""Parts of drafters that have files of their own: a vocabulary that may be a part of the target's, so that
all other tokens have no probability, and layers: Llama's, or Qwen3's, which norm queries and keys.

T tokens, N of them that are asked for, E hidden size, H heads, G key/value heads, D head width, V vocabulary
of the target, v that of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

# The logit of a token that the draft does not know: finite, for entropies, and without any probability at
# every temperature.
UNKNOWN_LOGIT = -1e30

# A layer's attention: from queries [T, H, D], or none, and keys and values [T, G, D] to as many [.., H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class OwnVocabularyModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """``d2t`` holds, for every id of the draft, how far the target's id lies above it; ``t2d``, for every id
    of the target, whether the draft has it; ``known_ids`` the target's ids themselves [v]. The model has
    ``embed_tokens`` of the target's vocabulary, and an ``lm_head`` of its own."""

    base_model_prefix = ""
    d2t: Tensor
    t2d: Tensor
    known_ids: Tensor

    def register_vocabulary(self, num_own: int) -> None:
        """The first ids, until others are read."""
        self.register_buffer("d2t", torch.zeros(num_own, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < num_own)
        self.register_buffer("known_ids", torch.arange(num_own), persistent=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def read_map(self) -> None:
        """Once ``d2t`` has changed."""
        self.known_ids.copy_(self.d2t + torch.arange(len(self.d2t), device=self.d2t.device))

    def know(self, token_ids: Tensor) -> None:
        """Let the vocabulary be these ids of the target [v], ascending."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.read_map()
        self.t2d.fill_(False)
        self.t2d[token_ids] = True

    def estimates(self, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor | None:
        """float32 [N]: of a confidence head, if there is one, for places with these states, after these
        tokens."""
        del hidden_NE, token_ids_N
        return None

    def whole_logits(self, own_Nv: Tensor) -> Tensor:
        """[N, V]: over the target's vocabulary, in the same dtype: float32 takes twice the time to read."""
        least = max(UNKNOWN_LOGIT, torch.finfo(own_Nv.dtype).min)
        whole_NV = own_Nv.new_full((len(own_Nv), self.config.vocab_size), least)
        return whole_NV.index_copy_(1, self.known_ids, own_Nv)


MLPS: dict[str, type[nn.Module]] = {"llama": LlamaMLP, "qwen3": Qwen3MLP}


class Rotation(NamedTuple):
    """Cosines and sines [.., T, D] of tokens' positions."""

    cosines: Tensor
    sines: Tensor

    @staticmethod
    def at(positions_T: Tensor, embedding: nn.Module, like: Tensor) -> Rotation:
        """The rotation by a model's rotary embedding, in the precision of another tensor."""
        cosines, sines = embedding(like, position_ids=positions_T[None])
        return Rotation(cosines[0], sines[0])

    def rotate(self, heads: Tensor) -> Tensor:
        """[.., T, H, D]."""
        rotated: Tensor = heads * self.cosines.unsqueeze(-2) + rotate_half(heads) * self.sines.unsqueeze(-2)
        return rotated


class DrafterAttention(nn.Module):
    """The projections of attention; what they read may be wider than the hidden states."""

    def __init__(self, config: Any, input_size: int, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        has_bias = bool(getattr(config, "attention_bias", False))
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(input_size, heads * width, bias=has_bias)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        self.o_proj = nn.Linear(num_heads * width, config.hidden_size, bias=has_bias)
        self.head_dim, self.has_norms = width, config.model_type == "qwen3"
        if self.has_norms:
            self.q_norm, self.k_norm = (LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(2))

    def forward(self, inputs_T: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, G, D]. In the form that fused kernels are found for."""
        queries, keys = self._heads(self.q_proj(inputs_T)), self._heads(self.k_proj(inputs_T))
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        values = self._heads(self.v_proj(inputs_T))
        cosines, sines = rotation
        queries, keys = apply_rotary_pos_emb(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], cosines[None], sines[None]
        )
        return queries[0].transpose(0, 1), keys[0].transpose(0, 1), values

    def keys_and_values(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[.., G, D] each."""
        heads = self._heads(self.k_proj(inputs))
        keys = rotation.rotate(self.k_norm(heads) if self.has_norms else heads)
        return keys, self._heads(self.v_proj(inputs))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class DrafterLayer(nn.Module):
    """A layer; the first one of EAGLE-3 reads embeddings and states side by side, each with its norm."""

    def __init__(self, config: Any, index: int, *, reads_embeddings: bool = False) -> None:
        super().__init__()
        size, self.index = config.hidden_size, index
        self.self_attn = DrafterAttention(config, 2 * size if reads_embeddings else size, index)
        self.mlp = MLPS[config.model_type](config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(2)
        )
        if reads_embeddings:
            self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_TE: Tensor,
        inputs_T: Tensor,
        rotation: Rotation,
        attend: Attend,
        index_N: Tensor | None = None,
    ) -> Tensor:
        """[N, E]: of the tokens at ``index_N``, by default of all; attention reads ``inputs_T``, and is asked
        for all tokens or, of no outputs, for none."""
        if index_N is not None and not len(index_N):
            keys, values = self.self_attn.keys_and_values(inputs_T, rotation)
            attend(self.index, keys[:0], keys, values)
            return hidden_TE[:0]
        attended = attend(self.index, *self.self_attn(inputs_T, rotation))
        if index_N is not None:
            # In a padded pass as many may be asked for as there are tokens, and not in their order.
            hidden_TE, attended = hidden_TE[index_N], attended[index_N]
        hidden_TE = hidden_TE + self.self_attn.o_proj(attended.flatten(-2))
        added: Tensor = hidden_TE + self.mlp(self.post_attention_layernorm(hidden_TE))
        return added
