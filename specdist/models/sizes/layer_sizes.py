"""What each layer of a model keeps of a token, from its configuration; and what of routed experts a rank
holds, reads in a pass, and computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from specdist.models.attention.expansion import Expansion, can_absorb, expansion_of_layer
from specdist.models.cache.key_value import SCALE_DTYPE
from specdist.models.files.checkpoint import HYBRID, STATE_LAYER_TYPES, TOKENWISE_LAYER_TYPES, kv_heads_of
from specdist.models.quantized.quantized_weights import LayerFormat

# The second is GPT-Neo's name.
SLIDING = ("sliding_attention", "local")
# Kinds of layers without attention.
KEYLESS = (STATE_LAYER_TYPES | TOKENWISE_LAYER_TYPES) - {HYBRID}

# Numbers of an expert's inner width that a grouped product on a GPU computes at a time: fewer cost as much.
# Assumed.
TILE_WIDTH = 64


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


@dataclass(frozen=True)
class Experts:
    """Routed experts of ``num_layers`` equal layers, of which a token runs through ``num_chosen``; those that
    all tokens run through are not among them.

    Attributes:
        num_experts: of each layer.
        num_numbers: of one expert, whatever the checkpoint has.
        width: of its inner products.
        form: of those that are quantised, with the ``matrices`` of an expert, (outputs, inputs) each: its
            first, and the one that comes after the inner width.
        is_known: they are modules that can be given to ranks.
    """

    num_layers: int
    num_experts: int
    num_chosen: int
    num_numbers: int
    width: int
    form: LayerFormat | None = None
    matrices: tuple[tuple[int, int], ...] = ()
    is_known: bool = True

    def rank_bytes(self, tp_size: int, bytes_per_number: int) -> float:
        """Bytes of one expert on one of so many ranks that each have a part of its inner width."""
        own = self.width // tp_size
        if self.form is None or (self.form.is_halved and own % 2):
            return self.num_numbers * bytes_per_number / tp_size
        (num_first, hidden), _ = self.matrices
        first = self.form.within(own, hidden).num_bytes(num_first // tp_size, hidden)
        last = self.form.within(hidden, own).num_bytes(hidden, own)
        num_others = self.num_numbers - sum(map(math.prod, self.matrices))
        return first + last + num_others * bytes_per_number / tp_size

    @property
    def num_all_numbers(self) -> int:
        """The numbers of all experts of all these layers."""
        return self.num_layers * self.num_experts * self.num_numbers

    @property
    def num_own_numbers(self) -> int:
        """The numbers of the experts that a token runs through, in all these layers."""
        return self.num_layers * self.num_chosen * self.num_numbers

    def num_distinct(self, num_tokens: float) -> float:
        """Expected experts of a layer that a forward of so many tokens reads, E (1 - (1 - k / E)^n), if each
        token chooses its k of E uniformly and by itself (Huang et al. 2025, "MoESD", arXiv 2505.19645).

        An upper bound: where some experts are chosen more often than others, or tokens of a text choose
        alike, fewer are read. Cohere ("Why MoE models get more from speculative decoding", 2026) reports 2.5
        times the experts of one token for four that follow each other, 31% less than this.
        """
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)

    def num_read(self, num_tokens: float, tp_size: int, *, is_whole: bool) -> float:
        """The experts that a rank reads a part of; of whole ones what the rank reads that has the most of
        them, if ranks choose by themselves."""
        distinct = self.num_distinct(num_tokens)
        if not is_whole:
            return distinct
        own, share = -(-self.num_experts // tp_size), distinct / self.num_experts
        return min(own, _most(own * share, own * share * (1 - share), tp_size))

    def num_pairs(self, num_tokens: float, tp_size: int, tile_rows: int = 1, *, is_whole: bool) -> float:
        """Pairs of a token and an expert that a rank computes, in whole experts, as many as fill the tiles of
        ``tile_rows`` tokens, of which the last of each expert is half empty: a part of every pair, or those
        of whole experts of the rank that has the most of them."""
        pairs = self.num_chosen * num_tokens
        empty = (tile_rows - 1) / 2 * self.num_read(num_tokens, tp_size, is_whole=is_whole)
        width, own = self.width / tp_size, (pairs + empty) / tp_size
        if is_whole:
            own = pairs / tp_size
            width, own = self.width, _most(own, own * (1 - 1 / tp_size), tp_size) + empty
        return own * math.ceil(width / TILE_WIDTH) * TILE_WIDTH / width


def _most(mean: float, variance: float, num_ranks: int) -> float:
    """Expected largest of so many equal numbers: at most this, of normal ones."""
    return mean + math.sqrt(2 * math.log(num_ranks) * variance)
