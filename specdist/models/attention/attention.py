"""Attention over the paged cache, plugged into any transformers model through its attention registry.

The registry hands over queries, keys and values of one layer; the pass in which this happens knows the pages
and every layer's scale, sliding window and soft cap. So no model code is copied.

T flat tokens, H heads, G key/value heads, D head width, R segments of a group,
Q queries and L keys of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specdist.models.batch.flat import AttentionGroup, AttentionPlan, SeenKeys
from specdist.models.cache.key_value import KeyValueCache

ATTENTION_NAME = "specdist_paged"
# The attribute of a layer's module that has it.
ABSORPTION = "absorption"


class AttentionRules(NamedTuple):
    """A layer's parameters of attention. With sinks every head has a logit more in its softmax, which is a
    weight of the layer and has no value. ``is_latent``: its values are the first numbers of its keys.
    ``hides_first``: nobody sees a sequence's first token, but this one itself. Without ``is_causal`` every
    query sees all keys of its segment, whatever the window."""

    scale: float | None
    window: int | None
    softcap: float | None
    has_sinks: bool = False
    is_latent: bool = False
    hides_first: bool = False
    is_causal: bool = True


class AttentionKind(NamedTuple):
    """What distinguishes the attention of one layer from that of another. ``value_width``: of values that
    are not as wide as the keys."""

    num_heads: int
    num_kv_heads: int
    width: int
    rules: AttentionRules
    value_width: int | None = None


class AttentionCall(NamedTuple):
    """Attention of one layer in one pass. Queries are [T, H, D]; keys and values [T, G, D] those of the same
    tokens, as a layer hands them over, or the pages [pages, page size, G, D] that a kernel reads. Values may
    have a width of their own, which is that of the output. ``sinks_H`` are the logits of the heads' sinks, if
    there are any; ``scales`` those of the keys and values of pages in 8 bits, whose bits the pages then are:
    [pages, page size, G] each (:mod:`specdist.models.cache.key_value`)."""

    queries_THD: Tensor
    keys: Tensor
    values: Tensor
    rules: AttentionRules
    sinks_H: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of_registry(
        query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules, sinks_H: Tensor | None
    ) -> AttentionCall:
        """The call of query [1, H, T, D], key and value [1, G, T, D]."""
        queries_THD, keys_TGD, values_TGD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return AttentionCall(queries_THD, keys_TGD, values_TGD, rules, sinks_H)

    @property
    def num_repeats(self) -> int:
        """Query heads that share a key/value head."""
        return self.queries_THD.shape[1] // self.keys.shape[-2]


class LayerAttention(Protocol):
    """What the models call once per layer."""

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """Output [T, H, D]."""


class Absorption(Protocol):
    """What a layer does that keeps latents instead of keys and values:
    :class:`specdist.models.attention.latent.Latents`."""

    def attend(self, attention: LayerAttention, layer: int, call: AttentionCall) -> Tensor:
        """The layer's own output, of its own queries and latents."""

    def keys_and_values(self, latents_LR: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """[L, heads, D + E] and [L, heads, V] of latents and rotated parts, [L, R + E]."""


class _Pass(NamedTuple):
    attention: LayerAttention
    rules: Mapping[int, AttentionRules]
    keeps_latents: bool


_running: ContextVar[_Pass] = ContextVar("the pass of this thread")


@contextlib.contextmanager
def attending(
    attention: LayerAttention, rules: Mapping[int, AttentionRules], *, keeps_latents: bool = True
) -> Iterator[None]:
    """A context in which a model's layers call ``attention`` with their ``rules``; with ``keeps_latents``
    those of latent attention on what they keep (:mod:`specdist.models.attention.latent`).

    Not a keyword argument of the call, which some families do not hand on to their layers. The rules are
    those of a dry run, see :mod:`specdist.models.families.dry_run`: what a layer hands over is not all of
    them.
    """
    token = _running.set(_Pass(attention, rules, keeps_latents))
    try:
        yield
    finally:
        _running.reset(token)


def is_running() -> bool:
    """Whether a pass over pages runs in this thread."""
    return _running.get(None) is not None


def is_keeping_latents() -> bool:
    """Whether such a pass runs in this thread, and keeps latents."""
    running = _running.get(None)
    return running is not None and running.keeps_latents


def absorption_of(layer: nn.Module) -> Absorption | None:
    """The absorption of the running pass; None of a layer that attends to its own keys and values."""
    found: Absorption | None = vars(layer).get(ABSORPTION)
    return found if found is not None and is_keeping_latents() else None


def running_attention() -> LayerAttention:
    """The attention of the running pass, for layers that know their rules themselves."""
    return _running.get().attention


def rotated_by(attention: LayerAttention, layer: int, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
    """What :meth:`specdist.models.attention.kernel.KernelAttention.rotate` gives; None of another pass."""
    rotate: Callable[..., tuple[Tensor, Tensor] | None] = getattr(attention, "rotate", lambda *_: None)
    return rotate(layer, *tensors)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registry's interface: query [1, H, T, D], key and value [1, G, T, D], sinks [H] → ([1, T, H, D],
    None)."""
    running, layer = _running.get(), int(module.layer_idx)  # type: ignore[arg-type]
    output_THD = attend_of_registry(
        running.attention, layer, module, (query, key, value), running.rules[layer], s_aux
    )
    # Some families take a view of it.
    return output_THD[None].contiguous(), None


def attend_of_registry(
    attention: LayerAttention,
    layer: int,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    rules: AttentionRules,
    sinks_H: Tensor | None,
) -> Tensor:
    """[T, H, D] of what a layer hands over: query [1, H, T, D], key and value [1, G, T, D], sinks."""
    call, absorption = AttentionCall.of_registry(*tensors, rules, sinks_H), absorption_of(module)
    if absorption is None:
        return attention.attend(layer, call)
    return absorption.attend(attention, layer, call)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class GroupedAttention:
    """One pass of a model whose windowed layers have pages of their own."""

    def __init__(
        self, windowed: frozenset[int], of_windowed: LayerAttention, of_others: LayerAttention
    ) -> None:
        self._windowed, self._of_windowed, self._of_others = windowed, of_windowed, of_others

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        return self._of(layer).attend(layer, call)

    def rotate(self, layer: int, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        return rotated_by(self._of(layer), layer, *tensors)

    def _of(self, layer: int) -> LayerAttention:
        return self._of_windowed if layer in self._windowed else self._of_others


class PagedAttention:
    """One pass: writes its keys and values into the cache, then reads of each group's pages what it sees."""

    def __init__(self, cache: KeyValueCache, plan: AttentionPlan) -> None:
        self._cache = cache
        self._plan = plan

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        queries_THD, rules = call.queries_THD, call.rules
        self._cache.write(layer, self._plan.cache_index_T, call.keys, call.values)
        if not len(queries_THD):
            return queries_THD  # keys and values are all that is wanted
        heads, width, value_width, is_latent = self._cache.shapes[layer]
        output_THD = None
        for group in self._plan.groups:
            index = group.query_index_RQ
            group_queries = queries_THD if index is None else queries_THD[index]
            # A hidden token is known by its place.
            seen = group.seen(None if rules.hides_first else rules.window)
            keys = self._cache.read(layer, seen.pages)
            keys_RGLD = _of_segments(keys, group, seen, heads, width)
            if is_latent:
                values_RGLD = keys_RGLD[..., :value_width]
            else:
                values = self._cache.read(layer, seen.pages, reads_values=True)
                values_RGLD = _of_segments(values, group, seen, heads, value_width)
            bias = seen.bias(
                rules.window,
                call.num_repeats,
                group_queries.dtype,
                hides_first=rules.hides_first,
                is_causal=rules.is_causal,
            )
            group_output = attend_segments(group_queries, keys_RGLD, values_RGLD, bias, rules, call.sinks_H)
            if group.output_index is None:
                return group_output
            if output_THD is None:
                output_THD = queries_THD.new_empty((*queries_THD.shape[:2], value_width))
            source, destination = group.output_index
            output_THD[destination] = group_output[source]
        assert output_THD is not None
        return output_THD


def _of_segments(gathered: Tensor, group: AttentionGroup, seen: SeenKeys, heads: int, width: int) -> Tensor:
    if seen.foreign_keys is not None:
        # With several sequences this is a copy.
        gathered.view(-1, heads * width).index_fill_(0, seen.foreign_keys, 0.0)
    return gathered.view(len(group.num_keys_R), -1, heads, width)[:, : seen.num_keys].transpose(1, 2)


def attend_segments(
    queries: Tensor,
    keys_RGLD: Tensor,
    values_RGLD: Tensor,
    bias: Tensor | None,
    rules: AttentionRules,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[R × Q, H, D] → the same, of the values' width. Query heads that share a key/value head become more
    queries of it.

    Args:
        bias: additive mask [R, 1, H / G × Q, L], as of :func:`specdist.models.batch.flat.causal_bias`.
    """
    num_segments, num_kv_heads, _, width = keys_RGLD.shape
    value_width = values_RGLD.shape[-1]
    # torch's kernels take keys and values of one width.
    if rules.is_latent:
        values_RGLD = keys_RGLD
    elif value_width < width:
        values_RGLD = F.pad(values_RGLD, (0, width - value_width))
    num_queries, num_repeats = queries.shape[0] // num_segments, queries.shape[1] // num_kv_heads
    folded = (
        queries.reshape(num_segments, num_queries, num_kv_heads, num_repeats, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_segments, num_kv_heads, num_repeats * num_queries, width)
    )
    if rules.softcap is None and sinks_H is None:
        output = F.scaled_dot_product_attention(
            folded, keys_RGLD, values_RGLD, attn_mask=bias, scale=rules.scale
        )
    else:
        scores = folded @ keys_RGLD.transpose(2, 3) * (width**-0.5 if rules.scale is None else rules.scale)
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        scores = scores if bias is None else scores + bias
        if sinks_H is not None:
            sinks = sinks_H.to(scores.dtype).view(num_kv_heads, num_repeats)
            sinks = sinks.repeat_interleave(num_queries, dim=1).expand(num_segments, -1, -1)
            scores = torch.cat([scores, sinks[..., None]], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
        output = weights[..., : keys_RGLD.shape[2]] @ values_RGLD
    return (
        output[..., :value_width]
        .unflatten(2, (num_repeats, num_queries))
        .permute(0, 3, 1, 2, 4)
        .reshape(num_segments * num_queries, num_kv_heads * num_repeats, value_width)
    )
