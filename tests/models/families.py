"""Tiny random models of every supported family."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    # Wide weights: peaked distributions, so that a wrong mask or a stale key changes the likeliest token.
    "initializer_range": 0.2,
}
_WITHOUT_GQA = {key: _COMMON[key] for key in _COMMON if key not in ("num_key_value_heads", "head_dim")}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": {key: _COMMON[key] for key in _COMMON if key != "head_dim"},
    "qwen3": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 16},
    "gemma": _COMMON,
    "gemma2": {**_COMMON, "sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gpt_neox": {**_WITHOUT_GQA, "rotary_pct": 0.5},
    # Its output head has a bias.
    "phi": _WITHOUT_GQA,
    "gpt2": {
        "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.2,
    },
    # With sinks.
    "granite_swa": {**_COMMON, "sliding_window": 16, "attention_multiplier": 0.3},
    # A global layer between local ones.
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4,
        "attention_types": [[["local", "global"], 1], [["local"], 1]], "window_size": 16,
        "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        "initializer_range": 0.2,
    },
    # Latent attention, as in DeepSeek V3.
    "youtu": {
        **_COMMON, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    },
}  # fmt: skip
# What is of interest when they are cut over ranks.
CUT: dict[str, dict[str, Any]] = {
    # Its queries, keys and values are joined, and the halves of its feed-forward part.
    "phi3": {key: _COMMON[key] for key in _COMMON if key != "head_dim"},
    # Its queries and its keys are normed over all heads.
    "olmo2": {key: _COMMON[key] for key in _COMMON if key != "head_dim"},
}

# With recurrent layers: the gated delta rule, short convolutions, and Mamba.
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_COMMON, "tie_word_embeddings": False, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {
        **_COMMON, "tie_word_embeddings": False, "layer_types": ["conv", "full_attention", "conv"],
    },
    # Attention and Mamba in every layer.
    "falcon_h1": {
        **_COMMON, "tie_word_embeddings": False, "mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 2,
    },
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model with transformers' own attention; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**(FAMILIES | CUT | RECURRENT)[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    spread_sinks(model)
    remember_longer(model)
    return model


@torch.no_grad()
def spread_sinks(model: PreTrainedModel) -> None:
    """So that attention without them, or with those of other heads, changes the likeliest token."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.copy_(torch.linspace(3.0, -1.0, len(parameter)))


@torch.no_grad()
def remember_longer(model: PreTrainedModel) -> None:
    """So that what a state lacks of its first tokens, or a convolution of its last, changes the likeliest
    token."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            of_heads = torch.linspace(-5.0, 1.0, len(parameter))
            parameter.copy_(of_heads.view(-1, *[1] * (parameter.dim() - 1)))
        elif "conv" in name and parameter.dim() == 3:
            parameter.mul_(3.0)


def noisy_copy(model: PreTrainedModel, scale: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A draft that agrees with the model often, and not always."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return copied
