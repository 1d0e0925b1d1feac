"""Models that the planner knows by name, so that nothing is downloaded: random shapes, and published mixtures
of experts. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdist.lab.synthetic.config import SHAPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The context length of a shape, which is not limited.
ANY_LENGTH = 2**20
# By their names on the hub, family and sizes as in their config.json. The first was published as 30.5B
# parameters, 3.3B of them active, counting the embedding's table; the second as 116.8B, 5.1B of them active,
# without it.
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
}  # fmt: skip
NAMED = (*SHAPES, *MIXTURES)


def named_config(name: str) -> PretrainedConfig:
    """The configuration of one of :data:`NAMED`."""
    import torch
    from transformers import AutoConfig

    if name in MIXTURES:
        family, sizes = MIXTURES[name]
        return AutoConfig.for_model(family, **sizes, dtype="bfloat16")
    shape = SHAPES[name]
    config = shape.llama_config(num_layers=shape.num_layers, dtype=torch.bfloat16)
    config.max_position_embeddings = ANY_LENGTH
    return config
