"""Attention over pages as one call for all segments, by a kernel of the project or in plain torch.

Our own Triton kernel takes any size of pages, dtype and rule; SDPA on copies of the pages is the last resort;
kernels of other libraries stand in :mod:`specdist.models.attention.library_kernels`.
:mod:`specdist.models.attention.probe` finds out at the start what this device can use. torch's FlashAttention
reads pages of a multiple of 256 tokens alone, and a page has 16 here.

T flat tokens, S segments, L keys per segment, H heads, G key/value heads, D head width, R rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specdist.models.attention.attention import AttentionCall, attend_segments
from specdist.models.batch.flat import PagedSegments, causal_bias
from specdist.models.cache.key_value import KeyValueCache, from_float8

# Keys that SDPA gathers at once: 2**17 keys of 8 heads of width 128 in bfloat16 are 256 MiB.
MAX_GATHERED_KEYS = 2**17
# What the Triton kernel may write, and read again, of the parts of long sequences that it works on at once.
MAX_SPLIT_BYTES = 2**26


class PagedKernel(Protocol):
    """Attention of all segments in one call."""

    name: str

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        """Output [T, H, D]; the call's keys and values are pages."""


class KernelAttention:
    """One pass: writes its keys and values into the cache, then calls a kernel over the pages."""

    def __init__(
        self, cache: KeyValueCache, kernel: PagedKernel, segments: PagedSegments, cache_index_T: Tensor
    ) -> None:
        self._cache = cache
        self._kernel = kernel
        self._segments = segments
        self._cache_index_T = cache_index_T
        # The newest keys and values, held so that no other tensors get their memory.
        self._written: tuple[Tensor, Tensor] | None = None

    def rotate(
        self, layer: int, keys_TGD: Tensor, values_TGD: Tensor, *rotation: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """As of :meth:`specdist.models.cache.key_value.KeyValueCache.write_rotated`. The layer's call does
        not write these keys and values again, unless it gets others."""
        rotated = self._cache.write_rotated(layer, self._cache_index_T, keys_TGD, values_TGD, *rotation)
        self._written = rotated and (rotated[1], values_TGD)
        return rotated

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        written, self._written = self._written, None
        if written is None or _memory(*written) != _memory(call.keys, call.values):
            self._cache.write(layer, self._cache_index_T, call.keys, call.values)
        if not len(call.queries_THD):
            return call.queries_THD  # keys and values are all that is wanted
        keys, values = self._cache.pages(layer)
        scales = self._cache.scales(layer)
        return self._kernel.attend(call._replace(keys=keys, values=values, scales=scales), self._segments)


def _memory(*tensors: Tensor) -> list[tuple[object, ...]]:
    """What they are, and in which order it is read."""
    return [(each.data_ptr(), each.shape, each.stride()) for each in tensors]


class SdpaKernel:
    """A kernel for every device, dtype and rule, and slow: SDPA, or plain operations for a soft cap and for
    sinks, on each token's own copy of its pages."""

    name = "SDPA on gathered pages"

    def __init__(self, max_gathered_keys: int = MAX_GATHERED_KEYS) -> None:
        self._max_gathered_keys = max_gathered_keys

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        queries_THD, key_pages, value_pages, rules, sinks_H, scales = call
        num_tokens = len(queries_THD)
        segment_T, used_T = segments.of_tokens(num_tokens)
        if not rules.is_causal:
            used_T = segments.used_S[segment_T]
        num_keys = segments.block_table_SP.shape[1] * key_pages.shape[1]
        bias = causal_bias(
            used_T[:, None] - 1,
            num_keys,
            window=rules.window,
            num_repeats=call.num_repeats,
            dtype=queries_THD.dtype,
            hides_first=rules.hides_first,
        )
        # What lies after a token's keys is hidden by the bias, but 0 × NaN is NaN.
        foreign_TL11 = (torch.arange(num_keys, device=used_T.device) >= used_T[:, None])[:, :, None, None]
        num_at_once = max(1, self._max_gathered_keys // num_keys)
        outputs = []
        for first in range(0, num_tokens, num_at_once):
            own = slice(first, first + num_at_once)
            table_RP = segments.block_table_SP[segment_T[own]]
            gathered = []
            for role, pages in enumerate((key_pages,) if rules.is_latent else (key_pages, value_pages)):
                taken = pages.index_select(0, table_RP.reshape(-1))
                if scales is not None:
                    own_scales = scales[role].index_select(0, table_RP.reshape(-1))
                    taken = from_float8(taken, own_scales, queries_THD.dtype)
                seen = taken.view(len(table_RP), num_keys, *pages.shape[2:])
                gathered.append(seen.masked_fill_(foreign_TL11[own], 0.0).transpose(1, 2))
            keys_RGLD, values_RGLD = gathered[0], gathered[-1][..., : value_pages.shape[-1]]
            outputs.append(
                attend_segments(queries_THD[own], keys_RGLD, values_RGLD, bias[own], rules, sinks_H)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class TritonKernel:
    """Our own, for every dtype, rule, page size and mixture of segments. The pages are read where they
    lie."""

    name = "Triton kernel on pages"

    def attend(self, call: AttentionCall, segments: PagedSegments) -> Tensor:
        queries_THD, key_pages, value_pages, rules, sinks_H, scales = call
        # Triton is not everywhere; the probe then says so.
        from specdist.kernels.paged_attention import paged_attention

        return paged_attention(
            queries_THD,
            key_pages,
            value_pages,
            segments.block_table_SP,
            segments.used_S,
            segments.query_starts_S1,
            sinks_H,
            *(scales or ()),
            max_queries=segments.num_queries,
            max_keys=segments.num_keys,
            max_split_bytes=MAX_SPLIT_BYTES,
            scale=rules.scale,
            window=rules.window,
            softcap=rules.softcap,
            is_latent=rules.is_latent,
            hides_first=rules.hides_first,
            is_causal=rules.is_causal,
        )
