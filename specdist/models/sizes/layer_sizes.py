"""What each layer of a model keeps of a token, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from specdist.models.attention.expansion import Expansion, can_absorb, expansion_of_layer
from specdist.models.cache.float8 import SCALE_DTYPE
from specdist.models.files.checkpoint import HYBRID, STATE_LAYER_TYPES, TOKENWISE_LAYER_TYPES, kv_heads_of

# The second is GPT-Neo's name.
SLIDING = ("sliding_attention", "local")
# Kinds of layers without attention.
KEYLESS = (STATE_LAYER_TYPES | TOKENWISE_LAYER_TYPES) - {HYBRID}


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of a token in one layer: ``num_heads`` heads of ``width`` and ``value_width`` numbers;
    attention reads back at most over a sliding ``window``. With ``is_latent`` the values are part of the one
    key, which is whole on every rank, and prompts may expand them (``expansion``)."""

    num_heads: int
    width: int
    value_width: int
    window: int | None
    is_latent: bool = False
    expansion: Expansion | None = None

    def num_numbers(self, tp_size: int) -> int:
        """Numbers that one rank keeps of a token, of at least one head."""
        own = max(1, self.num_heads // tp_size)
        return self.width if self.is_latent else own * (self.width + self.value_width)

    def cached_bytes(self, tp_size: int, number_bytes: int, is_float8: bool) -> int:
        """Bytes that they take on one rank; ``number_bytes``: of a number that is not in 8 bits."""
        numbers = self.num_numbers(tp_size)
        if not is_float8:
            return numbers * number_bytes
        num_scales = 1 if self.is_latent else 2 * max(1, self.num_heads // tp_size)
        return numbers + num_scales * SCALE_DTYPE.itemsize * (numbers > 0)

    def tokens_read(self, context_tokens: float) -> float:
        """Tokens whose keys and values one new token reads."""
        return context_tokens if self.window is None else min(context_tokens, self.window)

    def attended(self, context_tokens: float, num_queries: float) -> tuple[float, float]:
        """Products of a head and one of a sequence's ``num_queries`` tokens; bytes that the head moves beside
        those of the cache."""
        chunk = self.expansion and self.expansion.of_chunk(context_tokens, num_queries)
        return chunk or ((self.width + self.value_width) * self.tokens_read(context_tokens), 0)


def layers_of(text: Any, model: nn.Module, number_bytes: int) -> tuple[LayerCache, ...]:
    """What each of the model's layers keeps; ``text``: its configuration. Those without attention keep
    nothing."""
    latents = [layer for layer in model.modules() if can_absorb(layer)]
    if latents:
        rank, rotated = text.kv_lora_rank, text.qk_rope_head_dim
        expansion = expansion_of_layer(latents[0], number_bytes)
        own = LayerCache(1, rank + rotated, rank, None, is_latent=True, expansion=expansion)
        return (own,) * len(latents)
    # In some families layers differ.
    configs = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or getattr(text, "window_size", None)
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if kinds is None:
        # Without a list all layers use the window, if there is one; Qwen2 may name one without using it.
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = [SLIDING[0] if slides else ""] * text.num_hidden_layers
    layers = []
    for own, kind in zip(configs, kinds, strict=True):
        if kind in KEYLESS:
            layers.append(LayerCache(0, 0, 0, None))
            continue
        width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        layers.append(LayerCache(kv_heads_of(own), width, width, window if kind in SLIDING else None))
    return tuple(layers)
