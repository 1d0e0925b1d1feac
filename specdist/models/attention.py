"""Attention over the paged cache, plugged into any transformers model through its attention registry.

The registry hands over queries, keys and values of one layer with the layer's own scale, sliding window and
soft cap; the pages to use are passed in the ``paged_attention`` keyword argument of the model call. So no
model code is copied.

T flat tokens, H heads, G key/value heads, D head width, R segments of a group,
Q queries and L keys of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specdist.cache.key_value import KeyValueCache
from specdist.models.flat import AttentionGroup, AttentionPlan

ATTENTION_NAME = "specdist_paged"
HARMLESS_TENSORS = {"position_ids", "cache_position", "logits_to_keep"}


class AttentionRules(NamedTuple):
    """A layer's parameters of attention; ``extra``: keyword arguments that are not known here."""

    scale: float | None
    window: int | None
    softcap: float | None
    extra: Mapping[str, Any]


class AttentionKind(NamedTuple):
    """What distinguishes the attention of one layer from that of another."""

    num_heads: int
    num_kv_heads: int
    width: int
    rules: AttentionRules


class LayerAttention(Protocol):
    """What the models call once per layer."""

    def attend(
        self,
        layer: int,
        queries_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        rules: AttentionRules,
    ) -> Tensor: ...


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    paged_attention: LayerAttention,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registry's interface: query [1, H, T, D], key and value [1, G, T, D] → ([1, T, H, D], None)."""
    del attention_mask
    output_THD = paged_attention.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionRules(scaling, sliding_window, softcap, kwargs),
    )
    return output_THD[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class LayerShapes:
    """Stands in for the cache in a dry run and records every layer's (key/value heads, head width) and rules.

    ``kinds`` are those of attention that occur. ``foreign`` names tensors that a layer hands over for a kind
    that is not implemented here (such as attention sinks), and that would be ignored without an error.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.rules: dict[int, AttentionRules] = {}
        self.kinds: list[AttentionKind] = []
        self.foreign: set[str] = set()

    def attend(
        self,
        layer: int,
        queries_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        rules: AttentionRules,
    ) -> Tensor:
        self.shapes[layer] = (keys_TGD.shape[1], keys_TGD.shape[2])
        self.rules[layer] = rules._replace(extra={})
        kind = AttentionKind(queries_THD.shape[1], *self.shapes[layer], self.rules[layer])
        if kind not in self.kinds:
            self.kinds.append(kind)
        tensors = {name for name, value in rules.extra.items() if isinstance(value, Tensor)}
        self.foreign |= tensors - HARMLESS_TENSORS
        if values_TGD.shape != keys_TGD.shape:
            self.foreign.add("values narrower or wider than keys")
        return torch.zeros_like(queries_THD)


class PagedAttention:
    """One pass: writes its keys and values into the cache, then reads each group's pages."""

    def __init__(self, cache: KeyValueCache, plan: AttentionPlan) -> None:
        self._cache = cache
        self._plan = plan

    def attend(
        self,
        layer: int,
        queries_THD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        rules: AttentionRules,
    ) -> Tensor:
        self._cache.write(layer, self._plan.cache_index_T, keys_TGD, values_TGD)
        page_keys, page_values = self._cache.keys[layer], self._cache.values[layer]
        heads, width = self._cache.shapes[layer]
        output_THD = None
        for group in self._plan.groups:
            index = group.query_index_RQ
            group_queries = queries_THD if index is None else queries_THD[index]
            keys_RGLD, values_RGLD = (
                self._gather(pages, group, heads, width) for pages in (page_keys, page_values)
            )
            num_repeats = group_queries.shape[1] // heads
            bias = group.bias(rules.window, num_repeats, group_queries.dtype)
            group_output = attend_segments(group_queries, keys_RGLD, values_RGLD, bias, rules)
            if group.output_index is None:
                return group_output
            if output_THD is None:
                output_THD = torch.empty_like(queries_THD, memory_format=torch.contiguous_format)
            source, destination = group.output_index
            output_THD[destination] = group_output[source]
        assert output_THD is not None
        return output_THD

    def _gather(self, pages: Tensor, group: AttentionGroup, heads: int, width: int) -> Tensor:
        gathered = (
            pages[group.pages] if isinstance(group.pages, slice) else pages.index_select(0, group.pages)
        )
        if group.foreign_keys is not None:
            # With several sequences this is a copy.
            gathered.view(-1, heads * width).index_fill_(0, group.foreign_keys, 0.0)
        return gathered.view(group.num_segments, -1, heads, width)[:, : group.num_keys].transpose(1, 2)


def attend_segments(
    queries: Tensor, keys_RGLD: Tensor, values_RGLD: Tensor, bias: Tensor | None, rules: AttentionRules
) -> Tensor:
    """[R × Q, H, D] → the same shape. Query heads that share a key/value head become more queries of it.

    Args:
        bias: additive mask [R, 1, H / G × Q, L], as of :func:`specdist.models.flat.causal_bias`.
    """
    num_segments, num_kv_heads, _, width = keys_RGLD.shape
    num_queries, num_repeats = queries.shape[0] // num_segments, queries.shape[1] // num_kv_heads
    folded = (
        queries.reshape(num_segments, num_queries, num_kv_heads, num_repeats, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_segments, num_kv_heads, num_repeats * num_queries, width)
    )
    if rules.softcap is None:
        output = F.scaled_dot_product_attention(
            folded, keys_RGLD, values_RGLD, attn_mask=bias, scale=rules.scale
        )
    else:
        scores = folded @ keys_RGLD.transpose(2, 3) * (width**-0.5 if rules.scale is None else rules.scale)
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
        scores = scores if bias is None else scores + bias
        output = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype) @ values_RGLD
    return (
        output.view(num_segments, num_kv_heads, num_repeats, num_queries, width)
        .permute(0, 3, 1, 2, 4)
        .reshape(num_segments * num_queries, num_kv_heads * num_repeats, width)
    )
