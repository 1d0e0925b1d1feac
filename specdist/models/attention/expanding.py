"""Latent attention of many tokens of a sequence at once, as in long chunks of prompts.

Attention to latents (:mod:`specdist.models.attention.latent`) costs 2R + E products of a query, a key and a
head; to the head's own key and value, D + E + V of them: in DeepSeek-V3 1088 and 320. But these are first
made of the latents of all keys. So segments of many tokens expand latents, and others attend to them. Which
do follows from their numbers of tokens and keys alone, so ranks that share a model do the same. What is
recorded, whose segments are known only when it is replayed, never expands.

T flat tokens, Q queries and L keys of a segment, P pages, H heads, R width of a latent, D, E widths of a key
without and of its rotated part, V of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import (
    Absorption,
    AttentionCall,
    AttentionKind,
    LayerAttention,
    attend_segments,
)
from specdist.models.attention.expansion import Expansion
from specdist.models.attention.kernel import PagedKernel
from specdist.models.batch.flat import PagedSegments, Segments, causal_bias
from specdist.models.cache.key_value import KeyValueCache

# Keys and values that are expanded at a time, unless those of one head take more.
MAX_EXPANDED_BYTES = 2**28


def kind_of_expanded(expansion: Expansion, latent: AttentionKind) -> AttentionKind:
    """The kind of the attention that takes the place of one to latents."""
    width = expansion.key_width + expansion.rotated_width
    own = None if width == expansion.value_width else expansion.value_width
    heads = latent.num_heads
    return AttentionKind(heads, heads, width, latent.rules._replace(is_latent=False), own)


def expanding_segments(expansion: Expansion, segments: Segments) -> np.ndarray:
    """Numbers of the segments that expand."""
    pairs = zip(segments.lengths_S.tolist(), segments.num_keys_S.tolist(), strict=True)
    return np.flatnonzero([expansion.pays(*pair) for pair in pairs])


class _Segment(NamedTuple):
    """``tokens`` of a batch, their ``pages``, and for attention without a kernel their bias."""

    tokens: slice
    pages_P: Tensor
    paged: PagedSegments
    bias: Tensor | None


class ExpandedAttention:
    """One pass, in which some segments attend to keys and values that are expanded for them."""

    def __init__(
        self, cache: KeyValueCache, kernel: PagedKernel | None, expansion: Expansion, cache_index_T: Tensor,
        of_all: Callable[[], LayerAttention], of_others: LayerAttention | None, others_N: Tensor,
    ) -> None:  # fmt: skip
        """
        Args:
            kernel: for attention to what is expanded.
            of_all: of layers that keep no latents.
            of_others: of the other segments, whose tokens are ``others_N``, if there are any.
        """
        self._cache, self._kernel, self._expansion = cache, kernel, expansion
        self._cache_index_T = cache_index_T
        self._of_all, self._of_others, self._others_N = functools.cache(of_all), of_others, others_N
        self._segments: list[_Segment] = []

    def add(self, begin: int, num_queries: int, num_keys: int, pages_P: np.ndarray) -> None:
        """A segment that expands: its first token in the batch, and its pages."""
        device = self._cache_index_T.device
        pages = torch.from_numpy(pages_P.astype(np.int64)).to(device)
        numbers = torch.tensor([num_keys, 0, num_queries], dtype=torch.int32).to(device)
        table_SP = torch.arange(len(pages_P), dtype=torch.int32, device=device)[None]
        paged = PagedSegments(table_SP, numbers[:1].clone(), numbers[1:].clone(), num_queries, num_keys)
        bias = None
        if self._kernel is None:
            positions_RQ = torch.arange(num_keys - num_queries, num_keys, device=device)[None]
            bias = causal_bias(positions_RQ, num_keys, window=None, num_repeats=1, dtype=self._cache.dtype)
        self._segments.append(_Segment(slice(begin, begin + num_queries), pages, paged, bias))

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """The output of a layer that keeps keys and values."""
        return self._of_all().attend(layer, call)

    def mix(self, mixer: Any, rows_TR: Tensor) -> Tensor:
        """The output of a recurrent layer."""
        mixing: Any = self._of_all()
        mixed_TO: Tensor = mixing.mix(mixer, rows_TR)
        return mixed_TO

    def attend_latents(self, layer: int, call: AttentionCall, expanding: Absorption) -> Tensor:
        """Output [T, H, V]; the call's queries are the layer's own, and its keys latents."""
        # All is written before any is read: segments may share pages.
        self._cache.write(layer, self._cache_index_T, call.keys, call.values)
        num_tokens, num_heads, _ = call.queries_THD.shape
        output_THV = call.queries_THD.new_empty(num_tokens, num_heads, self._expansion.value_width)
        if self._of_others is not None:
            own_N = self._others_N
            others = call._replace(
                queries_THD=call.queries_THD[own_N], keys=call.keys[own_N], values=call.values[own_N]
            )
            output_THV[own_N] = expanding.attend(self._of_others, layer, others)
        for segment in self._segments:
            self._attend_segment(segment, layer, call, expanding, output_THV)
        return output_THV

    def _attend_segment(
        self, segment: _Segment, layer: int, call: AttentionCall, expanding: Absorption, output_THV: Tensor
    ) -> None:
        latents_LR = self._cache.read(layer, segment.pages_P)
        latents_LR = latents_LR.view(len(latents_LR) * self._cache.page_size, -1)
        num_at_once = max(1, MAX_EXPANDED_BYTES // (self._expansion.held_bytes * len(latents_LR)))
        rules, num_keys = call.rules._replace(is_latent=False), segment.paged.num_keys
        of_pages = len(segment.pages_P), self._cache.page_size
        for first in range(0, output_THV.shape[1], num_at_once):
            heads = slice(first, first + num_at_once)
            sinks_H = None if call.sinks_H is None else call.sinks_H[heads]
            queries_QHD = call.queries_THD[segment.tokens, heads]
            keys_LHD, values_LHV = expanding.keys_and_values(latents_LR, heads)
            if self._kernel is not None:
                keys, values = (each.unflatten(0, of_pages) for each in (keys_LHD, values_LHV))
                of_heads = AttentionCall(queries_QHD, keys, values, rules, sinks_H)
                found = self._kernel.attend(of_heads, segment.paged)
            else:
                keys, values = (each[:num_keys].transpose(0, 1)[None] for each in (keys_LHD, values_LHV))
                found = attend_segments(queries_QHD, keys, values, segment.bias, rules, sinks_H)
            output_THV[segment.tokens, heads] = found
