"""The segments of a pass as kernels for paged attention take them: tensors on the device.

T flat tokens, S segments, P pages per segment, Q queries per segment, L keys per segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdist.models.flat import FlatBatch, Segments, cache_indices, causal_bias


@dataclass
class PagedSegments:
    """The queries of a pass, and the pages that they read. The queries of a segment are its last tokens.

    Attributes:
        block_table_SP: int32 physical pages.
        used_S: int32 number of keys, the queries' own among them.
        query_starts_S1: int32 first query of every segment, and the number of queries.
        key_starts_S1: int32 first key of every segment among the tokens of ``page_list``, and their number.
        page_list: int32 pages of all segments, one after the other.
        num_queries: most queries of a segment.
        num_keys: no segment has more keys.
    """

    block_table_SP: Tensor
    used_S: Tensor
    query_starts_S1: Tensor
    key_starts_S1: Tensor
    page_list: Tensor
    num_queries: int
    num_keys: int
    _biases: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)
    _foreign_SL: Tensor | None = None

    @staticmethod
    def uniform(block_table_SP: Tensor, used_S: Tensor, *, num_queries: int, page_size: int) -> PagedSegments:
        """As many queries and pages for every segment: no shape depends on what the tensors hold."""
        num_segments, num_pages = block_table_SP.shape
        starts_S1 = torch.arange(num_segments + 1, dtype=torch.int32, device=used_S.device)
        num_keys = num_pages * page_size
        return PagedSegments(
            block_table_SP=block_table_SP,
            used_S=used_S,
            query_starts_S1=starts_S1 * num_queries,
            key_starts_S1=starts_S1 * num_keys,
            page_list=block_table_SP.reshape(-1),
            num_queries=num_queries,
            num_keys=num_keys,
        )

    def foreign_keys(self) -> Tensor:
        """Mask [S, L] of places beyond a segment's own keys, in pages of uniform segments. They hold other
        sequences' keys, or none: the bias hides them, but 0 × NaN is NaN. Built once per pass."""
        if self._foreign_SL is None:
            self._foreign_SL = torch.arange(self.num_keys, device=self.used_S.device) >= self.used_S[:, None]
        return self._foreign_SL

    def bias(self, window: int | None, num_repeats: int, dtype: torch.dtype) -> Tensor:
        """Mask [S, 1, num_repeats × Q, L] of uniform segments; built once per pass, shared by all layers."""
        key = (window, num_repeats, dtype)
        if key not in self._biases:
            offsets_Q = torch.arange(self.num_queries, device=self.used_S.device) - self.num_queries
            # A segment with fewer keys than queries is padded in front: such a query sees the first key.
            positions_SQ = (self.used_S[:, None] + offsets_Q).clamp_(min=0)
            self._biases[key] = causal_bias(
                positions_SQ, self.num_keys, window=window, num_repeats=num_repeats, dtype=dtype
            )
        return self._biases[key]


def ragged_segments(
    batch: FlatBatch, page_table: np.ndarray, page_size: int, device: torch.device
) -> tuple[PagedSegments, Tensor]:
    """The segments of a flat batch as they are, and its tokens' places in the cache, int64 [T].

    Args:
        page_table: int [slots, pages]: physical page of every stretch of ``page_size`` positions.
    """
    segments = Segments.of(batch)
    num_pages_S = -(-segments.num_keys_S // page_size)
    table_SP = page_table[batch.slots_T[segments.starts_S], : num_pages_S.max()]
    pages = table_SP[np.arange(table_SP.shape[1]) < num_pages_S[:, None]]
    parts = [
        cache_indices(batch, page_table, page_size),
        table_SP.ravel(),
        segments.num_keys_S,
        np.append(segments.starts_S, len(batch)),
        np.append(0, num_pages_S.cumsum() * page_size),
        pages,
    ]
    packed = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
    index_T, table, used_S, query_starts_S1, key_starts_S1, page_list = packed.split([len(p) for p in parts])
    paged = PagedSegments(
        block_table_SP=table.view(table_SP.shape),
        used_S=used_S,
        query_starts_S1=query_starts_S1,
        key_starts_S1=key_starts_S1,
        page_list=page_list,
        num_queries=int(segments.lengths_S.max()),
        num_keys=int(segments.num_keys_S.max()),
    )
    return paged, index_T.long()
