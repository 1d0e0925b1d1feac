"""Every family of causal language models that the installed transformers has, as tiny random models.

A family's configuration is its default one with small numbers in place of those of ``SMALL`` that it has, so
a family that comes with the next version of transformers is there without a line here. Windows, chunks and
borders of rotary embeddings lie at 16 or 32 tokens, well within what is run.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCAB_SIZE = 96
WINDOW, BORDER = 16, 32

# By the names under which families have them; of several names for the same each family has one.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "tie_word_embeddings": False, "is_decoder": True, "max_position_embeddings": 256, "n_positions": 256,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embedding_size": 64, "emb_dim": 64,
    "intermediate_size": 96, "n_inner": 96, "d_ff": 96, "ffn_dim": 96, "d_inner": 128, "dff": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4},
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "decoder_layers": 4, "encoder_layers": 4,
    "num_decoder_layers": 4, "num_encoder_layers": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4,
    "depth": 2,
    "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "head_dim": 16, "rotary_dim": 8,
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2, "window_size": WINDOW,
    "attention_window_size": WINDOW, "attention_chunk_size": WINDOW, "keep_window_size": WINDOW,
    "index_topk": WINDOW, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "hidden_size_per_layer_input": 8, "expert_ffn_hidden_size": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE, "zero_expert_num": 2, "ffn_hidden_size": 96,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,
}  # fmt: skip

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0],
    "original_max_position_embeddings": BORDER,
    "factor": 8.0,
}

# What a family needs besides, or instead.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["local", "global"], 2]]},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False},
    "mamba": {"intermediate_size": 128},
    "falcon_mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "dots3_note_text": {"head_dim": 16, "num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 5},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    **{
        family: {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            # Published ones have none, and in generate() the cache alone would know of it.
            "sliding_window": None,
        }
        for family in (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen3_vl_text",
            "qwen3_vl_moe_text",
            "qwen2_5_omni_text",
            "qwen3_omni_moe_text",
            "glm4v_text",
            "glm46v_text",
            "glm_ocr_text",
            "glmga_text",
            "paddleocr_vl_text",
        )
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    **{f"{name}_thinker": {"vision_start_token_id": 1} for name in ("qwen2_5_omni", "qwen3_omni_moe")},
    "kosmos_2_5_text_model": {"layers": 2, "embed_dim": 64, "attention_heads": 4, "ffn_dim": 96},
    "mistral4": {"head_dim": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "model_max_length": 256,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
}

# Rotary embeddings with borders, in families that have them in published models.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 (longrope)": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER},
    ),
    "llama (longrope)": ("llama", {"rope_parameters": LONGROPE}),
    "llama (llama3)": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": BORDER,
            }
        },
    ),
    "qwen2 (yarn)": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                "original_max_position_embeddings": BORDER,
            }
        },
    ),
    "llama (dynamic)": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}  # fmt: skip

# Models of texts and images, whose text model is that of a family.
WRAPPERS = tuple(
    family
    for family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)

FAMILIES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WRAPPERS, *VARIANTS)


def tiny_config(family: str) -> Any:
    """The configuration of a small model of the family, or of one of ``VARIANTS``."""
    family, more = VARIANTS.get(family, (family, {}))
    return _small(CONFIG_MAPPING[family], {**OWN.get(family, {}), **more})


def _small(config_class: Any, own: dict[str, Any]) -> Any:
    default = config_class()
    values = {name: value for name, value in SMALL.items() if name in vars(default)}
    if "qk_rope_head_dim" in values:  # latent attention: every query head has keys of its own
        values |= {"head_dim": 8, "num_key_value_heads": 4, "v_head_dim": 12}
    for name in config_class.sub_configs or {}:
        part = getattr(default, name, None)
        if part is not None:
            values[name] = _small(type(part), OWN.get(part.model_type, {})).to_dict()
    return config_class(**{**values, **own})


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model with transformers' own attention; ``changes``: of those numbers that its
    configuration has."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    vars(config).update({name: value for name, value in changes.items() if hasattr(config, name)})
    family = VARIANTS.get(family, (family, {}))[0]
    factory = (
        AutoModelForCausalLM if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    )
    model = factory.from_config(config, attn_implementation="eager").float().eval()
    spread(model, seed)
    return model


@torch.no_grad()
def spread(model: PreTrainedModel, seed: int) -> None:
    """Weights of a size at which a wrong mask or position changes the likeliest token; norms and biases that
    are not all the same, where a wrong cut would show nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        elif "norm" in name:
            parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
        elif name.endswith("bias"):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith("sinks"):  # of the weight of several keys
            parameter.copy_(3.0 * torch.rand(parameter.shape, generator=generator))


def near_copy(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """A draft that agrees with the model often, and not always."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return copied


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id."""
    words = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    backend = Tokenizer(WordLevel(words, unk_token="t2"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="t0", eos_token="t1", pad_token="t1")


def save_pair(family: str, folder: Path) -> PreTrainedModel:
    """``folder/target`` and ``folder/draft``, with a tokenizer; returns the target."""
    folder.mkdir(exist_ok=True)
    target = build(family)
    for name, model in (("target", target), ("draft", near_copy(target))):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return target
