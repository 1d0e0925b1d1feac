"""The segments of a pass as kernels for paged attention take them: tensors on the device.

T flat tokens, S segments, P pages per segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch, Segments, slot_mapping

# The alignment of numbers of four bytes: kernels read numbers faster at addresses that 16 divides, and are
# compiled anew for others.
ALIGNMENT = 4


@dataclass(frozen=True)
class PagedSegments:
    """The queries of a pass, and the pages that they read. The queries of a segment are its last tokens.

    Attributes:
        block_table_SP: int32 physical pages.
        used_S: int32 number of keys, the queries' own among them.
        query_starts_S1: int32 first query of every segment, and the number of queries.
        num_queries: no segment has more.
        num_keys: no segment has more.
    """

    block_table_SP: Tensor
    used_S: Tensor
    query_starts_S1: Tensor
    num_queries: int
    num_keys: int

    def of_tokens(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Each token's segment, int64 [T], and the number of keys that it sees, at least 1, int32 [T]. No
        shape depends on what the tensors hold."""
        tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=self.used_S.device)
        segment_T = torch.searchsorted(self.query_starts_S1, tokens_T, right=True) - 1
        num_after_T = self.query_starts_S1[1:][segment_T] - 1 - tokens_T
        return segment_T, (self.used_S[segment_T] - num_after_T).clamp_(min=1)


def ragged_segments(
    batch: FlatBatch, page_table: np.ndarray, page_size: int, device: torch.device
) -> tuple[PagedSegments, Tensor]:
    """The segments of a flat batch as they are, and its tokens' places in the cache, int64 [T].

    Args:
        page_table: int [slots, pages]: physical page of every stretch of ``page_size`` positions.
    """
    segments = Segments.of(batch)
    num_pages = -(-int(segments.num_keys_S.max()) // page_size)
    table_SP = page_table[batch.slots_T[segments.starts_S], :num_pages]
    parts = [
        slot_mapping(batch, page_table, page_size),
        table_SP.ravel(),
        segments.num_keys_S,
        np.append(segments.starts_S, len(batch)),
    ]
    rooms = [aligned(len(part)) for part in parts]
    packed = np.zeros(sum(rooms), np.int32)
    for room, part in zip(np.split(packed, np.cumsum(rooms)[:-1]), parts, strict=True):
        room[: len(part)] = part
    index_T, table, used_S, query_starts_S1 = (
        room[: len(part)]
        for room, part in zip(torch.from_numpy(packed).to(device).split(rooms), parts, strict=True)
    )
    paged = PagedSegments(
        block_table_SP=table.view(table_SP.shape),
        used_S=used_S,
        query_starts_S1=query_starts_S1,
        num_queries=int(segments.lengths_S.max()),
        num_keys=int(segments.num_keys_S.max()),
    )
    return paged, index_T.long()


def aligned(length: int) -> int:
    """The room of a part of a packed tensor."""
    return -(-length // ALIGNMENT) * ALIGNMENT
