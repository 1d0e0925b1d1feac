"""Models that the planner knows by name, so that nothing is downloaded: common shapes, and published mixtures
of experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PretrainedConfig

# The context length of a shape, which is not limited.
ANY_LENGTH = 2**20


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    def llama_config(self, dtype: torch.dtype, **others: Any) -> LlamaConfig:
        """A configuration without an end token, so that every completion has its maximum length. ``others``:
        options in the place of these."""
        from transformers import LlamaConfig

        options = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": ANY_LENGTH,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
            "dtype": str(dtype).removeprefix("torch."),
        }
        return LlamaConfig(**options | others)


# Columns: layers, hidden size, intermediate size, heads, key/value heads, vocabulary.
SHAPES = {
    "5m": Shape(8, 192, 512, 6, 6, 4096),
    "20m": Shape(8, 384, 1024, 6, 6, 8192),
    "125m": Shape(12, 768, 2048, 12, 12, 32000),
    "350m": Shape(24, 1024, 2560, 16, 16, 32000),
    "0.5b": Shape(24, 896, 4864, 14, 2, 64000),
    "1b": Shape(22, 2048, 5632, 32, 4, 32000),
    "7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "70b": Shape(80, 8192, 28672, 64, 8, 32000),
}
# Models by their names on the hub, with family and sizes as in their config.json. The first was published as
# 30.5B parameters, 3.3B of them active, counting the embedding's table; the second as 116.8B, 5.1B of them
# active, without it.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }),
    "openai/gpt-oss-120b": ("gpt_oss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
    }),
    # Its sizes are transformers' defaults of the family; it has a multi-token prediction head.
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe", {"text_config": {"max_position_embeddings": 262144}}),
}  # fmt: skip
NAMED = (*SHAPES, *MIXTURES)
# A draft of the target's shape, which stands for a trained one, and the ids that most published ones know.
EAGLE3, EAGLE3_IDS = "eagle3", 32_000


def named_config(name: str) -> PretrainedConfig:
    """The configuration of one of :data:`NAMED`."""
    import torch
    from transformers import AutoConfig

    if name in MIXTURES:
        family, sizes = MIXTURES[name]
        return AutoConfig.for_model(family, **sizes, dtype="bfloat16")
    return SHAPES[name].llama_config(torch.bfloat16)


def eagle3_config(target: PretrainedConfig) -> PretrainedConfig:
    """An EAGLE-3 draft: one layer with the sizes of the target's, and a head of its own."""
    import torch

    text = target.get_text_config()
    width, heads = text.hidden_size, text.num_attention_heads
    inner, kv_heads = (
        getattr(text, "intermediate_size", 3 * width),
        getattr(text, "num_key_value_heads", heads),
    )
    more = {"draft_vocab_size": min(EAGLE3_IDS, text.vocab_size), "architectures": ["LlamaForCausalLMEagle3"]}
    more["head_dim"] = getattr(text, "head_dim", None) or width // heads
    return Shape(1, width, inner, heads, kv_heads, text.vocab_size).llama_config(torch.bfloat16, **more)
