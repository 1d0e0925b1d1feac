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

# Each width, and each number of heads or experts, is one of its own under all names that families have for
# it: what takes one for another gets other tokens.
WIDTHS: dict[int, str] = {
    128: "hidden_size n_embd d_model emb_dim",
    112: "embedding_size word_embed_proj_dim",
    160: "intermediate_size n_inner d_ff ffn_dim d_inner dff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
    "dense_intermediate_size prefix_dense_intermediate_size",
    64: "moe_intermediate_size expert_ffn_hidden_size",
    224: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "share_expert_dim",
    8: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads",
    2: "num_key_value_heads",
    24: "head_dim kv_channels",
    20: "v_head_dim",
    18: "rotary_dim",
    10: "qk_rope_head_dim",
    12: "qk_nope_head_dim",
    28: "q_lora_rank",
    36: "kv_lora_rank",
    6: "num_experts num_local_experts n_routed_experts moe_num_experts",
    3: "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts",
    5: "n_shared_experts num_shared_experts moe_num_shared_experts",
    7: "zero_expert_num",
    13: "hidden_size_per_layer_input",
    17: "laurel_rank",
    # Of recurrent layers. Keys of the gated delta rule have as many heads as Mamba has groups.
    16: "linear_num_value_heads linear_num_heads mamba_num_heads mamba_n_heads n_mamba_heads",
    4: "linear_num_key_heads n_groups mamba_n_groups mamba_ngroups",
    14: "linear_key_head_dim linear_head_dim",
    22: "linear_value_head_dim",
    48: "mamba_head_dim mamba_d_head mamba_headdim",
    30: "mamba_d_state state_size ssm_state_size",
    9: "mamba_dt_rank time_step_rank",
}

SMALL: dict[str, Any] = {
    **{name: width for width, names in WIDTHS.items() for name in names.split()},
    "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "tie_word_embeddings": False, "is_decoder": True, "max_position_embeddings": 256, "n_positions": 256,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "decoder_layers": 4, "encoder_layers": 4,
    "num_decoder_layers": 4, "num_encoder_layers": 4, "num_layers": 4, "depth": 2,
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2, "window_size": WINDOW,
    "attention_window_size": WINDOW, "attention_chunk_size": WINDOW, "keep_window_size": WINDOW,
    "index_topk": WINDOW, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    # Heads × width of a head is hidden size × this.
    "mamba_expand": 6, "expand": 6,
}  # fmt: skip


def longrope(half: int) -> dict[str, Any]:
    """``half``: of the width that is rotated."""
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0,
        "original_max_position_embeddings": BORDER, "short_factor": [1.0] * half,
        "long_factor": torch.linspace(1.0, 10.0, half).tolist(),
    }  # fmt: skip


def mrope(half: int, **more: Any) -> dict[str, Any]:
    """Sections of time, height and width; texts have one position in all of them."""
    part = half // 4
    sections = [half - 2 * part, part, part]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


# Of models of texts and images.
MROPE = {
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_omni_text",
    "qwen3_omni_moe_text", "glm4v_text", "glm46v_text", "glm_ocr_text", "glmga_text", "paddleocr_vl_text",
}  # fmt: skip

# What a family needs besides, or instead.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["local", "global"], 2]]},
    "zaya": {"num_experts_per_tok": 1},
    "florence_vision": {"num_heads": (4, 8, 16, 32)},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False},
    "mamba2": {"num_heads": 16, "head_dim": 48},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 768},
    # Below any time step: generate() keeps to the limit in its prompts alone.
    "nemotron_h": {"time_step_min": 1e-9},
    "helium": {"head_dim": 16},  # its output projection takes the hidden size
    "dots3_note_text": {"head_dim": 24, "num_key_value_heads": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 5},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 160, "moe_num_experts": 6, "moe_top_k": 3},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "glm4v_moe_text": {"rope_parameters": mrope(4, partial_rotary_factor=0.5)},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [64, 64]},
    **{f"{name}_thinker": {"vision_start_token_id": 1} for name in ("qwen2_5_omni", "qwen3_omni_moe")},
    "kosmos_2_5_text_model": {"layers": 2, "embed_dim": 128, "attention_heads": 8, "ffn_dim": 160},
    "mistral4": {"head_dim": 22},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "model_max_length": 256,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "time_step_min": 1e-9},
    "laguna": {"num_attention_heads_per_layer": [8, 4, 8, 4]},
    "step3p5": {"num_sliding_attention_heads": 12},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 26,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {kind: mrope(12) for kind in ("sliding_attention", "full_attention")},
    },
}

# Rotary embeddings with borders, in families that have them in published models.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 (longrope)": (
        "phi3",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": BORDER},
    ),
    "llama (longrope)": ("llama", {"rope_parameters": longrope(12)}),
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
    for name, value in vars(default).items():
        if value is False and "bias" in name:
            values[name] = True
        elif type(value) is float and value == 1.0 and name.endswith("multiplier"):
            values[name] = 0.7
    if "qk_rope_head_dim" in values:  # latent attention: every query head has keys of its own
        values |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    if default.model_type in MROPE:
        width = values.get("head_dim", SMALL["hidden_size"] // SMALL["num_attention_heads"])
        # Published ones have no window, and in generate() the cache alone would know of it.
        values |= {"rope_parameters": mrope(width // 2), "sliding_window": None}
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
    """Weights of a size at which a wrong mask or position changes the likeliest token; norms, biases and
    other vectors, stored buffers among them, that are not all the same, where a lost or wrongly cut one would
    show nothing."""
    generator = torch.Generator().manual_seed(seed)
    names = model.state_dict()
    stored = [(name, buffer) for name, buffer in model.named_buffers() if name in names]
    for name, tensor in (*model.named_parameters(), *stored):
        if tensor.dim() > 1 and isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(0.14 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith("sinks"):  # of the weight of several keys
            tensor.copy_(3.0 * torch.rand(tensor.shape, generator=generator))
        elif tensor.is_floating_point():
            tensor.add_(0.8 * torch.rand(tensor.shape, generator=generator) - 0.4)


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
