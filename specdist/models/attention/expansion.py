"""Which layers have latent attention, and when it pays to expand their latents into keys and values: counted
from widths alone (:mod:`specdist.models.attention.latent`, :mod:`specdist.models.attention.expanding`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

# What a layer of latent attention has, by its names in transformers.
EXPAND = "expand_kv"
WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
# A GPU of the Hopper generation computes 295 operations in bfloat16 while it moves a byte; kernels come
# nearer to its bandwidth than to that.
OPERATIONS_PER_BYTE = 150
# Keys are written by a product, read to be joined with the rotated part, written and read; values written and
# read.
KEY_MOVES, VALUE_MOVES = 4, 2


class Expansion(NamedTuple):
    """Widths of a layer's keys and values, and bytes of a number of theirs."""

    latent_width: int
    rotated_width: int
    key_width: int
    value_width: int
    number_bytes: int

    @property
    def num_expanded(self) -> int:
        """Numbers of a head's key and value."""
        return self.key_width + self.rotated_width + self.value_width

    @property
    def num_products(self) -> int:
        """Products that make them of a latent; as many make a query and an output those of latents."""
        return self.latent_width * (self.key_width + self.value_width)

    @property
    def moved_bytes(self) -> int:
        """Bytes of a head's key and value, moved from when they are made until attention has read them."""
        of_key = KEY_MOVES * (self.key_width + self.rotated_width)
        return (of_key + VALUE_MOVES * self.value_width) * self.number_bytes

    @property
    def held_bytes(self) -> int:
        """The most that a head's key and value take meanwhile."""
        return (self.num_expanded + self.key_width) * self.number_bytes

    def expanded_flops(self, num_queries: float, num_keys: float) -> float:
        """Operations of a head: a multiplication and an addition per product."""
        num_pairs = num_queries * (num_keys - (num_queries - 1) / 2)
        return 2 * (num_pairs * self.num_expanded + num_keys * self.num_products)

    def absorbed_flops(self, num_queries: float, num_keys: float) -> float:
        """Operations of a head that attends to latents."""
        num_pairs = num_queries * (num_keys - (num_queries - 1) / 2)
        width = 2 * self.latent_width + self.rotated_width
        return 2 * (num_pairs * width + num_queries * self.num_products)

    def pays(self, num_queries: float, num_keys: float) -> bool:
        """Whether these tokens, of a sequence of ``num_keys`` with them, attend to expanded keys and
        values."""
        moved = OPERATIONS_PER_BYTE * num_keys * self.moved_bytes
        return self.expanded_flops(num_queries, num_keys) + moved < self.absorbed_flops(num_queries, num_keys)

    @property
    def fewest_queries(self) -> float:
        """Segments of no more queries never expand: a bound of :meth:`pays` for any number of keys. Of these
        either a few are queries, and all have to be made, or all are, which see half of each other."""
        saved = 2 * (2 * self.latent_width + self.rotated_width - self.num_expanded)
        moved = OPERATIONS_PER_BYTE * self.moved_bytes
        return min(2 * self.num_products + moved, 2 * moved) / saved if saved > 0 else math.inf

    def of_chunk(self, num_before: float, num_queries: float) -> tuple[float, float] | None:
        """What a head costs where tokens after ``num_before`` others expand latents: products per query, but
        for those of its own that the layer's projections have; and bytes that are moved."""
        num_keys = num_before + num_queries / 2  # as an average query sees
        if not self.pays(num_queries, num_keys):
            return None
        products = self.expanded_flops(num_queries, num_keys) / 2 / num_queries - self.num_products
        return products, num_keys * self.moved_bytes


def expansion_of_layer(layer: Any, number_bytes: int) -> Expansion:
    """Widths of its keys and values; ``number_bytes``: of a number of theirs."""
    return Expansion(
        layer.kv_lora_rank, layer.qk_rope_head_dim, layer.qk_nope_head_dim, layer.v_head_dim, number_bytes
    )


def can_absorb(layer: nn.Module) -> bool:
    """Whether it has the parts of latent attention."""
    has_widths = all(isinstance(getattr(layer, name, None), int) for name in WIDTHS)
    projection = getattr(layer, "kv_b_proj", None)
    return (
        has_widths
        and callable(getattr(type(layer), EXPAND, None))
        and isinstance(projection, nn.Module)
        and getattr(projection, "bias", None) is None
    )
