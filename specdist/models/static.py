"""Passes of fixed shapes: decoding steps and verification blocks, padded up to a bucket.

A pass over a few tokens is bound by launching its kernels, unless a recorded pass is replayed; a recording
always runs with the same shapes, at the same addresses. So a batch of short segments is laid
out as S segments of Q tokens with P pages each, in buffers that are never moved. A segment's own tokens are
the last of its Q. Padding tokens write to a scratch page that belongs to no sequence, and their output is
dropped.

T = S × Q tokens, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.cache.key_value import KeyValueCache
from specdist.models.attention import LayerAttention
from specdist.models.flat import FlatBatch, Segments, cache_indices
from specdist.models.graphs import Capturer, CheckedGraphs
from specdist.models.kernel import KernelAttention, PagedKernel
from specdist.models.segments import PagedSegments
from specdist.models.staging import InputStaging
from specdist.utils.ranges import arange_segments

SEGMENT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUERY_BUCKETS = (1, 2, 4, 6, 8, 12, 16)
# Beyond this a pass is no longer bound by launches.
MAX_TOKENS = 512
# Up to so many tokens a pass is bound by reading the weights, and padding is free; above, it may double them.
FREE_TOKENS = 128
# Fewer keys than this cost nothing; above, the bucket doubles.
MIN_KEYS = 256
# Keys of all segments together, padding included. Copying the pages of more takes longer than launching the
# kernels, and a pass that is not recorded copies only pages that are used; it also bounds what graphs hold.
MAX_KEYS = 2**18
NUM_SCRATCH_PAGES = 1

RunModel = Callable[[Tensor, Tensor, Tensor, LayerAttention, Tensor | None], Tensor]


class Bucket(NamedTuple):
    """The shape of a static pass."""

    num_segments: int
    num_queries: int
    num_pages: int
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return self.num_segments * self.num_queries

    @property
    def part_lengths(self) -> list[int]:
        """Of the packed inputs: token ids, positions, cache indices, logits, used keys, block table."""
        num_tokens, num_segments = self.num_tokens, self.num_segments
        return [
            *3 * [num_tokens],
            self.num_logits,
            num_segments,
            num_segments * self.num_pages,
        ]


def choose_bucket(segments: Segments, num_logits: int, *, page_size: int, table_width: int) -> Bucket | None:
    """The smallest bucket that holds the segments; None if none does, or if padding would cost more.

    Ranks that share a model must make the same choice, or their collectives would not match: nothing here
    depends on the device.

    Args:
        table_width: most pages of a slot.
    """
    num_segments = _smallest(SEGMENT_BUCKETS, len(segments.lengths_S))
    num_queries = _smallest(QUERY_BUCKETS, int(segments.lengths_S.max()))
    if num_segments is None or num_queries is None:
        return None
    most_tokens = min(MAX_TOKENS, max(FREE_TOKENS, 2 * int(segments.lengths_S.sum())))
    if num_segments * num_queries > most_tokens:
        return None
    num_keys = max(MIN_KEYS, 1 << int(segments.num_keys_S.max() - 1).bit_length())
    num_pages = min(-(-num_keys // page_size), table_width)
    if num_segments * num_pages * page_size > MAX_KEYS:
        return None
    return Bucket(
        num_segments=num_segments,
        num_queries=num_queries,
        num_pages=num_pages,
        # A decoding step wants logits of one token per segment, a verification of any number.
        num_logits=num_segments if num_logits <= num_segments else num_segments * num_queries,
    )


def _smallest(buckets: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(buckets, wanted)
    return buckets[index] if index < len(buckets) else None


def pack_inputs(
    host: np.ndarray,
    bucket: Bucket,
    batch: FlatBatch,
    segments: Segments,
    logits_index: np.ndarray,
    page_table: np.ndarray,
    *,
    page_size: int,
    scratch_page: int,
) -> np.ndarray:
    """Write the padded inputs of a pass into ``host``; returns where each of the batch's tokens went, [T]."""
    num_segments, num_queries, num_pages, _ = bucket
    ends = np.cumsum(bucket.part_lengths)
    token_ids, positions, cache_index, logits, used, table = np.split(host[: ends[-1]], ends[:-1])
    lengths_S, num_keys_S = segments.lengths_S, segments.num_keys_S
    num_real = len(lengths_S)
    first_S = np.arange(1, num_real + 1) * num_queries - lengths_S
    places_T = np.repeat(first_S, lengths_S) + arange_segments(lengths_S)
    token_ids.fill(0)
    if not isinstance(batch.token_ids_T, Tensor):
        token_ids[places_T] = batch.token_ids_T
    positions.fill(0)
    positions[places_T] = batch.positions_T
    cache_index[:] = scratch_page * page_size + np.arange(len(cache_index)) % page_size
    cache_index[places_T] = cache_indices(batch, page_table, page_size)
    # If no logits are wanted, any token will do; else the first real one is repeated.
    logits.fill(places_T[0])
    logits[: len(logits_index)] = places_T[logits_index]
    # A padding segment has one key, so that its attention is finite.
    used.fill(1)
    used[:num_real] = num_keys_S
    table_SP = table.reshape(num_segments, num_pages)
    table_SP.fill(scratch_page)
    is_used_SP = np.arange(num_pages) * page_size < num_keys_S[:, None]
    pages_SP = page_table[batch.slots_T[segments.starts_S], :num_pages]
    table_SP[:num_real] = np.where(is_used_SP, pages_SP, scratch_page)
    return places_T


class StaticPasses:
    """The static passes of one runner, which share their buffers."""

    def __init__(
        self,
        run_model: RunModel,
        cache: KeyValueCache,
        kernel: PagedKernel,
        *,
        scratch_page: int,
        num_slots: int,
        table_width: int,
        device: torch.device,
        capturer: Capturer | None,
        takes_features: bool = False,
    ) -> None:
        """
        Args:
            run_model: (token ids [T], positions [T], logits index [N], attention, features [3, N]) to logits
                [N, V].
            capturer: None runs every pass unrecorded.
            takes_features: ``run_model`` gets features of the tokens whose logits are wanted; else None.
        """
        self._run_model = run_model
        self._cache = cache
        self._kernel = kernel
        self._scratch_page = scratch_page
        self._table_width = table_width
        self._device = device
        self._graphs = CheckedGraphs(capturer)
        most_segments = _smallest(SEGMENT_BUCKETS, num_slots) or SEGMENT_BUCKETS[-1]
        largest = Bucket(most_segments, -(-MAX_TOKENS // most_segments), table_width, MAX_TOKENS)
        self._staging = InputStaging(sum(largest.part_lengths), device)
        # They may be on the device already, so they are not among the staged inputs.
        self._features_3N = torch.zeros(3, MAX_TOKENS, device=device) if takes_features else None

    def forward(
        self,
        batch: FlatBatch,
        logits_index: np.ndarray,
        page_table: np.ndarray,
        features_3N: Tensor | None = None,
    ) -> Tensor | None:
        """Logits [N, V] as of :meth:`specdist.models.runner.ModelRunner.forward`; None if no bucket fits."""
        segments = Segments.of(batch)
        page_size = self._cache.page_size
        bucket = choose_bucket(
            segments, len(logits_index), page_size=page_size, table_width=self._table_width
        )
        if bucket is None:
            return None
        places_T = pack_inputs(
            self._staging.host(),
            bucket,
            batch,
            segments,
            logits_index,
            page_table,
            page_size=page_size,
            scratch_page=self._scratch_page,
        )
        buffer = self._staging.send(sum(bucket.part_lengths))
        if isinstance(batch.token_ids_T, Tensor):
            index_T = torch.from_numpy(places_T).to(self._device)
            buffer.index_copy_(0, index_T, batch.token_ids_T.to(self._device, torch.int32))
        if self._features_3N is not None and features_3N is not None:
            self._features_3N[:, : len(logits_index)] = features_3N
        logits = self._graphs.run(bucket, lambda: self._compute(bucket))
        # A replay of another pass may write to the same memory.
        return logits[: len(logits_index)].clone()

    @torch.inference_mode()
    def _compute(self, bucket: Bucket) -> Tensor:
        """The pass over the buffer's contents. No shape depends on them."""
        packed = self._staging.buffer[: sum(bucket.part_lengths)]
        *_, used_S, table = packed.split(bucket.part_lengths)
        num_indices = 3 * bucket.num_tokens + bucket.num_logits
        token_ids_T, positions_T, cache_index_T, logits_index_N = (
            packed[:num_indices].long().split(bucket.part_lengths[:4])
        )
        segments = PagedSegments.uniform(
            table.view(bucket.num_segments, bucket.num_pages),
            used_S,
            num_queries=bucket.num_queries,
            page_size=self._cache.page_size,
        )
        attention = KernelAttention(self._cache, self._kernel, segments, cache_index_T)
        features_3N = None if self._features_3N is None else self._features_3N[:, : bucket.num_logits]
        return self._run_model(token_ids_T, positions_T, logits_index_N, attention, features_3N)
