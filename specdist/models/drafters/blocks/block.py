"""Drafters that propose a block in one pass: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Hidden states of some of the target's layers, joined and projected, are the context: every layer makes keys
and values of them, at the positions of their tokens. A block stands after the context: the next token, which
the target has not run yet, then mask tokens. Its tokens see the whole context, and each other in both
directions. So all of a block's distributions are known before anything is drawn, and in DFlash none depends
on what is drawn. DSpark's *Markov head* adds to the logits of a token what it reads of the token before it.

Checkpoints have the names, shapes and layers of the published ones: Qwen3's, without a causal mask.

A sequences, B tokens of a block, T tokens of contexts, N tokens, E hidden size, S numbers of the states side
by side, H heads, G key/value heads, D head width, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from specdist.models.drafters.own_vocabulary import OwnVocabularyModel

GATED = "gated"
# Of a layer: from queries [N, H, D], keys and values [N, G, D] of the block's tokens to [N, H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Cosines and sines [N, 1, D].
Rotation = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """The projections of Qwen3's attention; keys and values are those of contexts as well."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, bias = config.head_dim, config.attention_bias
        sizes = [
            heads * width
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        ]
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, size, bias=bias) for size in sizes
        )
        self.o_proj = nn.Linear(sizes[0], config.hidden_size, bias=bias)
        self.q_norm, self.k_norm = (Qwen3RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.head_dim = width

    def queries(self, inputs_NE: Tensor, rotation: Rotation) -> Tensor:
        """[N, H, D]."""
        return rotated(self.q_norm(self._heads(self.q_proj(inputs_NE))), rotation)

    def keys_and_values(self, inputs_NE: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[N, G, D] each."""
        keys_NGD = rotated(self.k_norm(self._heads(self.k_proj(inputs_NE))), rotation)
        return keys_NGD, self._heads(self.v_proj(inputs_NE))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """[N, H, D] at the rotation's positions."""
    cosines, sines = rotation
    turned: Tensor = heads * cosines + rotate_half(heads) * sines
    return turned


class BlockLayer(nn.Module):
    """A layer of Qwen3 over a block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self, hidden_NE: Tensor, rotation: Rotation, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        inputs_NE = self.input_layernorm(hidden_NE)
        keys, values = self.self_attn.keys_and_values(inputs_NE, rotation)
        attended = attend(self.self_attn.queries(inputs_NE, rotation), keys, values)
        hidden_NE = hidden_NE + self.self_attn.o_proj(attended.flatten(-2))
        added: Tensor = hidden_NE + self.mlp(self.post_attention_layernorm(hidden_NE))
        return added


class MarkovHead(nn.Module):
    """Of DSpark: what the token before one adds to its logits, in two matrices of a low rank; ``gated``: by
    how much, says the hidden state."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        if config.markov_head_type == GATED:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, token_ids_N: Tensor, hidden_NE: Tensor) -> Tensor:
        """[N, v]: to be added to the logits of these hidden states, after these tokens."""
        read = self.markov_w1(token_ids_N)
        if self.gate_proj is not None:
            read = read * torch.sigmoid(self.gate_proj(torch.cat([hidden_NE, read], dim=-1)))
        added: Tensor = self.markov_w2(read)
        return added


class BlockDrafter(OwnVocabularyModel):
    """The draft, from a configuration of :mod:`specdist.models.drafters.blocks.block_config`."""

    config_class = Qwen3Config
    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        num_own = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        state_size = config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(len(config.state_layers) * state_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_hidden_layers)])
        self.hidden_norm, self.norm = (
            Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.lm_head = nn.Linear(config.hidden_size, num_own, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.register_vocabulary(num_own)
        self.post_init()

    def rotation(self, positions_N: Tensor) -> Rotation:
        cosines, sines = self.rotary_emb(self.fc.weight, position_ids=positions_N[None])
        return cosines[0, :, None], sines[0, :, None]

    def contexts(self, states_TS: Tensor, positions_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every layer the keys and values [T, G, D] of tokens with these states of the target."""
        joined_TE, rotation = self.hidden_norm(self.fc(states_TS)), self.rotation(positions_T)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            yield layer.self_attn.keys_and_values(joined_TE, rotation)

    def block(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """[N, E]: the output states of the tokens of blocks, one block after the other."""
        hidden_NE, rotation = self.embed_tokens(token_ids_N), self.rotation(positions_N)
        for index, layer in enumerate(self.layers):
            hidden_NE = layer(hidden_NE, rotation, lambda *heads, of=index: attend(of, *heads))
        normed: Tensor = self.norm(hidden_NE)
        return normed

    def after(self, own_Nv: Tensor, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor:
        """float32 [N, V]: logits over the target's vocabulary, of a block's logits [N, v] and states, where
        these tokens stand before."""
        if self.markov_head is not None:
            own_Nv = own_Nv + self.markov_head(token_ids_N, hidden_NE)
        return self.whole_logits(own_Nv)
