"""The size of a model: parameters, weights on each rank, keys and values of a token. No weights needed.

The model is built from its configuration without memory, so that every family counts as transformers builds
it. Which of its tensors DeepSpeed cuts follows :mod:`specdist.models.loading`: the linear layers inside the
blocks, in parts that are equal where 64 times the number of ranks divides their width; the head along the
vocabulary. Embeddings, norms and the biases that follow a sum are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from specdist.models.checkpoint import UNSHARDABLE_FAMILIES

# GPT-Neo has its own name for this.
SLIDING = ("sliding_attention", "local")
# A sum over ranks ends attention, and another one the feed-forward part.
ALL_REDUCES_PER_LAYER = 2
# The matrices whose output is such a sum: every rank adds the whole bias once.
SUMMED = ("o_proj", "down_proj", "dense_4h_to_h", "attention.dense", "self_attn.dense", "fc2")


@dataclass(frozen=True)
class LayerCache:
    """What a token leaves in one layer: ``num_heads`` key/value heads of ``width`` numbers; a sliding
    ``window`` bounds how far back they are read."""

    num_heads: int
    width: int
    window: int | None

    def tokens_read(self, context_tokens: float) -> float:
        """Tokens whose keys and values one new token reads."""
        return context_tokens if self.window is None else min(context_tokens, self.window)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Counts of numbers, each ``bytes_per_number`` wide.

    Attributes:
        num_parameters: of the model, tied ones once.
        num_cut: in matrices that tensor parallelism cuts; ``num_whole``: in tensors that every rank keeps and
            reads (norms, some biases); ``num_embedding``: in tables of which a pass reads single rows.
        num_head: in the output head, cut along the vocabulary. A head tied to the embedding is the same
            memory on one rank, and memory of its own on several.
        num_query_heads: for the arithmetic of attention.
        widest_product: most numbers of a token that a cut matrix gives, the head aside.
        has_softcap: attention squeezes its scores, which no kernel here does.
        is_shardable: whether DeepSpeed can shard its family.
    """

    name: str
    bytes_per_number: int
    num_parameters: int
    num_cut: int
    num_whole: int
    num_embedding: int
    num_head: int
    is_tied: bool
    hidden_size: int
    num_query_heads: int
    vocab_size: int
    widest_product: int
    has_softcap: bool
    is_shardable: bool
    layers: tuple[LayerCache, ...]
    max_positions: int

    def weight_bytes(self, tp_size: int) -> int:
        """Weights on one rank."""
        head = 0 if self.is_tied and tp_size == 1 else -(-self.num_head // tp_size)
        return (self.num_cut // tp_size + self.num_whole + self.num_embedding + head) * self.bytes_per_number

    def streamed_bytes(self, tp_size: int) -> int:
        """Weights that a pass reads on one rank, whatever the number of its tokens."""
        cut = (self.num_cut + self.num_head) // tp_size
        return (cut + self.num_whole) * self.bytes_per_number

    def flops_per_token(self, tp_size: int) -> float:
        """Operations of one token on one rank, attention aside: a product and a sum per weight."""
        return 2 * (self.num_cut + self.num_head) / tp_size

    def attention_flops(self, tp_size: int, context_tokens: float) -> float:
        """Operations of one token's attention on one rank: scores, and the sum of values."""
        read = sum(layer.width * layer.tokens_read(context_tokens) for layer in self.layers)
        return 4 * self.num_query_heads / tp_size * read

    def cache_bytes_per_token(self, tp_size: int) -> int:
        """Keys and values of one token on one rank."""
        numbers = sum(2 * (layer.num_heads // tp_size) * layer.width for layer in self.layers)
        return numbers * self.bytes_per_number

    def cache_read_bytes(self, tp_size: int, context_tokens: float) -> float:
        """Keys and values that attention reads on one rank for one row."""
        read = sum(
            2 * (layer.num_heads / tp_size) * layer.width * layer.tokens_read(context_tokens)
            for layer in self.layers
        )
        return read * self.bytes_per_number

    def tp_sizes(self, most: int) -> list[int]:
        """Numbers of ranks up to ``most`` that can share it, dividing its heads and its key/value heads."""
        heads = (self.num_query_heads, *(layer.num_heads for layer in self.layers))
        most = most if self.is_shardable else min(most, 1)
        return [size for size in range(1, most + 1) if not any(count % size for count in heads)]


def model_size(
    name: str, config: PretrainedConfig, bytes_per_number: int, *, trusts_code: bool = False
) -> ModelSize:
    """Count a model from its configuration; numbers of weights and cache have ``bytes_per_number`` each.

    ``trusts_code``: the code that its folder brings along may be run to build it.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusts_code)
    text = config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    num_head = sum(weight.numel() for weight in head.parameters()) if head is not None else 0
    parameters = {id(weight): weight.numel() for weight in model.parameters()}
    num_cut = num_embedding = 0
    # Where the configuration has one: experts are no linear layers.
    widest = getattr(text, "intermediate_size", None) or 0
    for module_name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, nn.Embedding):
            num_embedding += module.weight.numel()
        elif isinstance(module, (nn.Linear, Conv1D)):
            num_cut += module.weight.numel()
            widest = max(widest, module.nf if isinstance(module, Conv1D) else module.out_features)
            if module.bias is not None and not module_name.endswith(SUMMED):
                num_cut += module.bias.numel()
    num_parameters = sum(parameters.values())
    num_own_head = 0 if is_tied else num_head
    return ModelSize(
        name=name,
        bytes_per_number=bytes_per_number,
        num_parameters=num_parameters,
        num_cut=num_cut,
        num_whole=num_parameters - num_cut - num_embedding - num_own_head,
        num_embedding=num_embedding,
        num_head=num_head,
        is_tied=is_tied,
        hidden_size=text.hidden_size,
        num_query_heads=text.num_attention_heads,
        vocab_size=text.vocab_size,
        widest_product=widest,
        has_softcap=bool(getattr(text, "attn_logit_softcapping", None)),
        is_shardable=text.model_type not in UNSHARDABLE_FAMILIES,
        layers=_layers(text),
        max_positions=text.max_position_embeddings,
    )


def _layers(text: Any) -> tuple[LayerCache, ...]:
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    window = getattr(text, "sliding_window", None) or getattr(text, "window_size", None)
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if kinds is None:
        # Without a list every layer slides, if there is a window; Qwen2 names one that it may not use.
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = [SLIDING[0] if slides else ""] * text.num_hidden_layers
    return tuple(LayerCache(num_kv_heads, width, window if kind in SLIDING else None) for kind in kinds)
