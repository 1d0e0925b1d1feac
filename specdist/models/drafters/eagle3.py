"""EAGLE-3 drafts (Li et al. 2025, arXiv 2503.01840): one layer that drafts from the target's states.

Hidden states of three of the target's layers, fused by ``fc`` into one, say what the target knows after a
token. The layer reads them beside the embedding of the token that follows; its own output stands for the
fused state of that token, until the target has run it. Checkpoints have the names and shapes of the published
ones (``LlamaForCausalLMEagle3``); their embeddings are the target's.

T tokens, N tokens whose logits are wanted, E hidden size, S numbers of the three states side by side, H
heads, G key/value heads, D head width, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from specdist.models.drafters.declaration import OwnFilesDrafter, ReadStates
from specdist.models.drafters.own_vocabulary import OwnVocabularyModel

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_STATES = 3
# From queries [N, H, D], keys and values [T, G, D] to [N, H, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rotation(NamedTuple):
    """Cosines and sines [.., T, D] of tokens' positions."""

    cosines: Tensor
    sines: Tensor

    def select(self, index_N: Tensor) -> Rotation:
        return Rotation(self.cosines[index_N], self.sines[index_N])

    def rotate(self, heads: Tensor) -> Tensor:
        """[.., T, H, D]."""
        rotated: Tensor = heads * self.cosines.unsqueeze(-2) + rotate_half(heads) * self.sines.unsqueeze(-2)
        return rotated


class EagleAttention(nn.Module):
    """The projections of attention, whose input is twice as wide as the hidden states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width, num_kv_heads = 2 * config.hidden_size, config.num_key_value_heads
        sizes = [heads * self.head_dim for heads in (config.num_attention_heads, num_kv_heads, num_kv_heads)]
        has_bias = bool(getattr(config, "attention_bias", False))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias=has_bias) for size in sizes)
        self.o_proj = nn.Linear(sizes[0], config.hidden_size, bias=has_bias)

    def queries(self, inputs: Tensor, rotation: Rotation) -> Tensor:
        """[.., H, D]."""
        return rotation.rotate(self._heads(self.q_proj(inputs)))

    def keys_and_values(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[.., G, D] each."""
        return rotation.rotate(self._heads(self.k_proj(inputs))), self._heads(self.v_proj(inputs))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class EagleLayer(nn.Module):
    """A Llama layer that reads embeddings and states side by side, each with a norm of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config)
        self.mlp = LlamaMLP(config)
        norms = [LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = norms

    def inputs(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[.., 2 × E]: of attention."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)

    def outputs(self, states: Tensor, attended: Tensor) -> Tensor:
        """[.., E]: from the states that came in, and what attention gives [.., H, D]."""
        added: Tensor = states + self.self_attn.o_proj(attended.flatten(-2))
        return added + self.mlp(self.post_attention_layernorm(added))


class LlamaForCausalLMEagle3(OwnVocabularyModel):
    """The draft, under the name that published configurations have."""

    config_class = LlamaConfig
    config: LlamaConfig
    # They are the target's.
    _keys_to_ignore_on_save = ["embed_tokens.weight"]  # noqa: RUF012 (transformers' own interface)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        vocab_size = config.vocab_size
        num_own = getattr(config, "draft_vocab_size", None) or vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        num_read = EAGLE3.num_read_numbers(config)
        self.fc = nn.Linear(num_read, config.hidden_size, bias=bool(getattr(config, "bias", 0)))
        self.midlayer = EagleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, num_own, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_vocabulary(num_own)
        self.post_init()

    def rotation(self, positions: Tensor) -> Rotation:
        """Of positions [T]. The first pair of a token and a state before it is at position 0."""
        cosines, sines = self.rotary_emb(self.fc.weight, position_ids=positions[None])
        return Rotation(cosines[0], sines[0])

    def draft(
        self, token_ids_T: Tensor, states_TE: Tensor, rotation: Rotation, index_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Of tokens and the states before them: output states [N, E] of those at ``index_N``, and logits
        [N, V] of what follows these."""
        attention, is_all = self.midlayer.self_attn, len(index_N) == len(token_ids_T)
        inputs = self.midlayer.inputs(self.embed_tokens(token_ids_T), states_TE)
        keys, values = attention.keys_and_values(inputs, rotation)
        if not is_all:
            inputs, states_TE, rotation = inputs[index_N], states_TE[index_N], rotation.select(index_N)
        attended = attend(attention.queries(inputs, rotation), keys, values)
        outputs_NE = self.midlayer.outputs(states_TE, attended)
        return outputs_NE, self.logits(outputs_NE)

    def logits(self, outputs_NE: Tensor) -> Tensor:
        """float32 [N, V]: over the target's vocabulary, from output states."""
        return self.whole_logits(self.lm_head(self.norm(outputs_NE)))


class Eagle3(OwnFilesDrafter):
    """Drafts token by token from three of the target's states."""

    what = "an EAGLE-3 draft"

    def fits(self, config: Any) -> bool:
        names = getattr(config, "architectures", None) or ()
        return any(name in ARCHITECTURES for name in names)

    def build(self, config: Any, **options: Any) -> PreTrainedModel:
        del options
        return LlamaForCausalLMEagle3(config)

    def faults(self, config: Any, target_config: Any) -> list[str]:
        found = super().faults(config, target_config)
        if config.model_type != "llama" or config.num_hidden_layers != 1:
            found.append(
                f"a {config.model_type} draft with {config.num_hidden_layers} layers, not one of Llama"
            )
        if getattr(config, "norm_before_residual", False):
            found.append("norm_before_residual, which is not read here")
        return found

    def read_states(self, config: Any, num_target_layers: int) -> ReadStates:
        own = getattr(config, "eagle_config", None) or {}
        name = "eagle_aux_hidden_state_layer_ids"
        named = own.get(name) if isinstance(own, dict) else None
        given = named or getattr(config, name, None)
        layers = tuple(sorted(given or (2, num_target_layers // 2, num_target_layers - 3)))
        if len(set(layers)) != NUM_STATES or not all(
            type(layer) is int and 0 <= layer < num_target_layers for layer in layers
        ):
            raise ValueError(
                f"the draft reads the states before layers {', '.join(map(str, layers))} ({name}), and not "
                f"three of the target's {num_target_layers}"
            )
        return ReadStates(layers)

    def num_read_numbers(self, config: Any) -> int:
        return NUM_STATES * self.state_size(config)

    def num_kept_numbers(self, config: Any) -> int:
        return int(config.hidden_size)


EAGLE3 = Eagle3()
