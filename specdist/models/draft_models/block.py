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

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from specdist.models.draft_models.layers import Attend, DrafterLayer, Rotation
from specdist.models.draft_models.own_vocabulary import OwnVocabularyModel

GATED = "gated"


class MarkovHead(nn.Module):
    """DSpark's head for what the token before one adds to its logits, in two matrices of a low rank;
    ``gated``: by how much, says the hidden state."""

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


class ConfidenceHead(nn.Module):
    """DSpark's head for how likely the token of a place is accepted, by its hidden state, and perhaps by what
    the Markov head reads of the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features_NF: Tensor) -> Tensor:
        """float32 [N]"""
        estimates: Tensor = self.proj(features_NF)[:, 0].float().sigmoid()
        return estimates


class BlockDrafter(OwnVocabularyModel):
    """The draft, from a configuration of :mod:`specdist.models.draft_models.block_config`."""

    config_class = Qwen3Config
    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        num_own = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        state_size = config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(len(config.state_layers) * state_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            [DrafterLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.hidden_norm, self.norm = (
            Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.lm_head = nn.Linear(config.hidden_size, num_own, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.confidence_width
        self.confidence_head = ConfidenceHead(width) if width else None
        self.register_vocabulary(num_own)
        self.post_init()

    def contexts(self, states_TS: Tensor, positions_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values [T, G, D] of every layer, of tokens with these states of the target."""
        joined_TE = self.hidden_norm(self.fc(states_TS))
        rotation = Rotation.at(positions_T, self.rotary_emb, self.fc.weight)
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            yield layer.self_attn.keys_and_values(joined_TE, rotation)

    def block(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """[N, E]: the output states of the tokens of blocks, one block after the other."""
        rotation = Rotation.at(positions_N, self.rotary_emb, self.fc.weight)
        hidden_NE = self.embed_tokens(token_ids_N)
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            hidden_NE = layer(hidden_NE, layer.input_layernorm(hidden_NE), rotation, attend)
        normed: Tensor = self.norm(hidden_NE)
        return normed

    def after(self, own_Nv: Tensor, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor:
        """float32 [N, V]: logits over the target's vocabulary, of a block's logits [N, v] and states, where
        these tokens stand before."""
        if self.markov_head is not None:
            own_Nv = own_Nv + self.markov_head(token_ids_N, hidden_NE)
        return self.whole_logits(own_Nv)

    def estimates(self, hidden_NE: Tensor, token_ids_N: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        if self.config.confidence_width > self.config.hidden_size:
            assert self.markov_head is not None
            hidden_NE = torch.cat([hidden_NE, self.markov_head.markov_w1(token_ids_N)], dim=-1)
        estimates: Tensor = self.confidence_head(hidden_NE)
        return estimates
