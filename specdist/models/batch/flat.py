"""The flat batch: the one shape in which both models are ever run.

Parallel 1-D arrays of token ids, slots and positions: prompt chunks, verification blocks of different lengths
and single draft steps are the same call and may be mixed in one. The tokens of a slot stand together, at
consecutive positions. There is no padding and no batch axis.

Kernels for paged attention take its segments as tensors on the device; plain operations groups of them.

T flat tokens, S segments (a slot's tokens), P pages of each, R segments of a group, Q queries and L keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.key_value import BranchPageTable
from specdist.sampling.uploads import upload

# Segments share an attention call while the shortest has at least half the keys of the longest, so padding
# never doubles the work; below this many keys the call itself costs more than the padding.
FREE_PADDING_KEYS = 128
# Added to the position of a token with the frequencies of a rope beyond its border
# (specdist.models.attention.rope).
IS_LONG = 2**30
# The alignment of numbers of four bytes: kernels read numbers faster at addresses that 16 divides, and are
# compiled anew for others.
ALIGNMENT = 4


@dataclass(frozen=True)
class FlatBatch:
    """Tokens to run. ``token_ids`` may already be on the device; slots and positions are host int arrays.

    Attributes:
        position_ids_T: positions as the model's layers know them, if these differ.
        windowed_pages_SP: the table of windowed layers, if they have pages of their own.
        is_mask_T: tokens before which a drafter has no state; None where all have one.
    """

    token_ids_T: np.ndarray | Tensor
    slots_T: np.ndarray
    positions_T: np.ndarray
    position_ids_T: np.ndarray | None = field(default=None, kw_only=True)
    windowed_pages_SP: np.ndarray | None = field(default=None, kw_only=True)
    is_mask_T: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def model_positions_T(self) -> np.ndarray:
        """Positions as the model's layers know them."""
        return self.positions_T if self.position_ids_T is None else self.position_ids_T

    def __len__(self) -> int:
        return len(self.slots_T)

    @staticmethod
    def joined(batches: list[FlatBatch]) -> FlatBatch:
        """Batches of tokens on the host, one after the other."""
        return FlatBatch(
            np.concatenate([np.asarray(batch.token_ids_T) for batch in batches]),
            np.concatenate([batch.slots_T for batch in batches]),
            np.concatenate([batch.positions_T for batch in batches]),
        )

    def parts(self, num_tokens: int) -> Iterator[FlatBatch]:
        """Parts of at most so many tokens each; none of an empty batch."""
        for begin in range(0, len(self), num_tokens):
            own = slice(begin, begin + num_tokens)
            yield FlatBatch(self.token_ids_T[own], self.slots_T[own], self.positions_T[own])


@dataclass(frozen=True)
class Segments:
    """Where each slot's tokens stand in a flat batch, and how many keys its last token sees."""

    starts_S: np.ndarray
    lengths_S: np.ndarray
    num_keys_S: np.ndarray

    @staticmethod
    def of(batch: FlatBatch) -> Segments:
        slots_T = batch.slots_T
        changes = (slots_T[1:] != slots_T[:-1]).nonzero()[0] + 1
        # Not np.append and np.diff: in a pass of few tokens their own checks take longer than the work.
        bounds = np.concatenate([[0], changes, [len(slots_T)]])
        starts_S, ends_S = bounds[:-1], bounds[1:]
        return Segments(starts_S, ends_S - starts_S, batch.positions_T[ends_S - 1] + 1)


def model_positions(
    slots_T: np.ndarray, positions_T: np.ndarray, table: BranchPageTable, rope_border: int | None
) -> np.ndarray:
    """Positions as the model's layers know them: [T]."""
    if rope_border is None:
        return positions_T
    return positions_T + IS_LONG * table.are_long(slots_T, positions_T, rope_border)


def for_layers(batch: FlatBatch, table: BranchPageTable, rope_border: int | None = None) -> FlatBatch:
    """The batch with positions for a rope that has a border, and with the table of windowed layers."""
    if rope_border is None and table.windowed_pages is None:
        return batch
    position_ids_T = model_positions(batch.slots_T, batch.positions_T, table, rope_border)
    return replace(batch, position_ids_T=position_ids_T, windowed_pages_SP=table.windowed_pages)


def slot_mapping(batch: FlatBatch, page_table: np.ndarray, page_size: int) -> np.ndarray:
    """Where in the cache each token's key and value belong: int64 [T], counted in tokens.

    Args:
        page_table: int [slots, pages]: physical page of every stretch of ``page_size`` positions.
    """
    slots_T, positions_T = batch.slots_T, batch.positions_T
    pages_T = page_table[slots_T, positions_T // page_size].astype(np.int64)
    return pages_T * page_size + positions_T % page_size


def previous_slots(
    batch: FlatBatch, page_table: np.ndarray, page_size: int, no_state: int | None
) -> np.ndarray:
    """Slots of the cache, as of :func:`slot_mapping`, of the tokens before these; a first token has its own,
    and masks ``no_state``."""
    before_T = np.maximum(batch.positions_T - 1, 0)
    places_T = slot_mapping(FlatBatch(before_T, batch.slots_T, before_T), page_table, page_size)
    if batch.is_mask_T is not None and no_state is not None:
        places_T[batch.is_mask_T] = no_state
    return places_T


def causal_bias(
    positions_RQ: Tensor,
    num_keys: int,
    *,
    window: int | None,
    num_repeats: int,
    dtype: torch.dtype,
    hides_first: bool = False,
) -> Tensor:
    """Additive mask [R, 1, num_repeats × Q, L]: -inf where a key is in the future, or out of the window, or
    the first, and this one is hidden."""
    keys_L = torch.arange(num_keys, device=positions_RQ.device)
    hidden_RQL = keys_L > positions_RQ[:, :, None]
    if window is not None:
        hidden_RQL |= keys_L <= positions_RQ[:, :, None] - window
    if hides_first:
        hidden_RQL |= (keys_L == 0) & (positions_RQ[:, :, None] > 0)
    bias_RQL = torch.zeros(hidden_RQL.shape, dtype=dtype, device=keys_L.device)
    bias_RQL.masked_fill_(hidden_RQL, -torch.inf)
    return bias_RQL.repeat(1, num_repeats, 1)[:, None]


@dataclass
class SeenKeys:
    """The keys of a group's segments, padded to a common number, from each segment's first page that any
    query of its own sees.

    Attributes:
        pages: physical pages, segment by segment; a slice where they are consecutive and need no copy.
        foreign_keys: places in the segments' pages, counted in tokens, of keys beyond a segment's own that
            only longer ones of the group have; None where all are equally long. What lies there was written
            by other sequences, or never: the bias hides it, but 0 × NaN is NaN.
        positions_RQ: place of every query among the keys; a key is visible at or before it.
        sees_all_keys: every query is at the last key's position, as in a decoding step of equal lengths.
    """

    num_keys: int
    pages: Tensor | slice
    foreign_keys: Tensor | None
    positions_RQ: Tensor
    sees_all_keys: bool
    _biases: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def bias(
        self,
        window: int | None,
        num_repeats: int,
        dtype: torch.dtype,
        *,
        hides_first: bool = False,
        is_causal: bool = True,
    ) -> Tensor | None:
        """Additive mask [R, 1, num_repeats × Q, L]: -inf where a key is in the future, out of the window,
        hidden or padding. None where every query sees every key. Built once per pass, shared by all
        layers."""
        if window is not None and window >= self.num_keys:
            window = None
        if self.sees_all_keys and window is None and not hides_first:
            return None
        key = (window, num_repeats, dtype, hides_first, is_causal)
        if key not in self._biases:
            # The last query sees all.
            seen_RQ = (
                self.positions_RQ if is_causal else self.positions_RQ[:, -1:].expand_as(self.positions_RQ)
            )
            self._biases[key] = causal_bias(
                seen_RQ,
                self.num_keys,
                window=window,
                num_repeats=num_repeats,
                dtype=dtype,
                hides_first=hides_first,
            )
        return self._biases[key]


@dataclass
class AttentionGroup:
    """Segments whose queries and keys are padded to common lengths for one attention call.

    Attributes:
        query_index_RQ: flat position of every query; None where the group is the whole batch, unpadded.
        output_index: flat positions in the group's (segment, query) order that are real, not padding.
        positions_RQ: position of every query.
        num_keys_R, pages_RP: of the segments, with all keys.
    """

    query_index_RQ: Tensor | None
    output_index: tuple[Tensor, Tensor] | None
    positions_RQ: np.ndarray
    num_keys_R: np.ndarray
    pages_RP: np.ndarray
    page_size: int
    device: torch.device
    _seen: dict[int | None, SeenKeys] = field(default_factory=dict)

    def seen(self, window: int | None) -> SeenKeys:
        """What layers with this window read; worked out once per pass, shared by all of them."""
        if window not in self._seen:
            firsts_R = np.zeros_like(self.num_keys_R)
            if window is not None:
                firsts_R = np.maximum(0, self.positions_RQ[:, 0] - window + 1) // self.page_size
            is_whole = window is not None and not firsts_R.any()
            self._seen[window] = self.seen(None) if is_whole else self._from(firsts_R)
        return self._seen[window]

    def _from(self, firsts_R: np.ndarray) -> SeenKeys:
        """The keys from these pages of the segments on."""
        begins_R = firsts_R * self.page_size
        num_keys_R, positions_RQ = self.num_keys_R - begins_R, self.positions_RQ - begins_R[:, None]
        num_keys = int(num_keys_R.max())
        num_pages = -(-num_keys // self.page_size)
        # Beyond a segment's own pages nothing is read.
        columns_RP = np.minimum(firsts_R[:, None] + np.arange(num_pages), self.pages_RP.shape[1] - 1)
        return SeenKeys(
            num_keys=num_keys,
            pages=_pages(np.take_along_axis(self.pages_RP, columns_RP, axis=1), self.device),
            foreign_keys=_foreign_keys(num_keys_R, num_pages * self.page_size, self.device),
            positions_RQ=torch.from_numpy(positions_RQ).to(self.device),
            sees_all_keys=bool(positions_RQ.min() == num_keys - 1),
        )


@dataclass(frozen=True)
class AttentionPlan:
    """Where a pass writes its keys and values, and which attention calls read them."""

    cache_index_T: Tensor
    groups: list[AttentionGroup]


def plan_attention(
    batch: FlatBatch, page_table: np.ndarray, page_size: int, device: torch.device
) -> AttentionPlan:
    """Group the batch's segments by similar lengths; ``page_table`` as of :func:`slot_mapping`."""
    slots_T, positions_T = batch.slots_T, batch.positions_T
    segments = Segments.of(batch)
    starts_S, lengths_S, num_keys_S = segments.starts_S, segments.lengths_S, segments.num_keys_S
    cache_index_T = torch.from_numpy(slot_mapping(batch, page_table, page_size)).to(device)
    groups = []
    for members_R in similar_segments(lengths_S, num_keys_S):
        num_queries, num_keys = int(lengths_S[members_R].max()), int(num_keys_S[members_R].max())
        last_R1 = lengths_S[members_R][:, None] - 1
        # A padding query repeats the segment's last token: its output is computed and dropped.
        index_RQ = starts_S[members_R][:, None] + np.minimum(np.arange(num_queries), last_R1)
        whole = len(members_R) == len(starts_S) and index_RQ.size == len(batch)
        in_order = whole and bool((index_RQ.ravel() == np.arange(len(batch))).all())
        groups.append(
            AttentionGroup(
                query_index_RQ=None if in_order else torch.from_numpy(index_RQ.ravel()).to(device),
                output_index=None if in_order else _output_index(index_RQ, last_R1, device),
                positions_RQ=positions_T[index_RQ],
                num_keys_R=num_keys_S[members_R],
                pages_RP=page_table[slots_T[starts_S[members_R]], : -(-num_keys // page_size)],
                page_size=page_size,
                device=device,
            )
        )
    return AttentionPlan(cache_index_T, groups)


def similar_segments(lengths_S: np.ndarray, num_keys_S: np.ndarray) -> Iterator[np.ndarray]:
    """Yield arrays of segment numbers whose numbers of queries, and of keys, are within a factor of two."""
    if len(lengths_S) == 1:
        yield np.zeros(1, np.int64)
        return
    buckets_S = np.ceil(np.log2(lengths_S)).astype(np.int64)
    order = np.lexsort((np.arange(len(lengths_S)), num_keys_S, buckets_S)).tolist()
    buckets, num_keys = buckets_S.tolist(), num_keys_S.tolist()
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            first, this = order[begin], order[end]
            close = num_keys[this] <= max(2 * num_keys[first], FREE_PADDING_KEYS)
            if buckets[this] == buckets[first] and close:
                continue
        yield np.sort(np.array(order[begin:end]))
        begin = end


def _output_index(index_RQ: np.ndarray, last_R1: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    real = np.flatnonzero((np.arange(index_RQ.shape[1]) <= last_R1).ravel())
    return torch.from_numpy(real).to(device), torch.from_numpy(index_RQ.ravel()[real]).to(device)


def _foreign_keys(num_keys_R: np.ndarray, num_places: int, device: torch.device) -> Tensor | None:
    if len(num_keys_R) == 1:
        return None
    places_P = np.arange(num_places)
    is_foreign_RP = (places_P >= num_keys_R[:, None]) & (places_P < num_keys_R.max())
    return torch.from_numpy(np.flatnonzero(is_foreign_RP)).to(device) if is_foreign_RP.any() else None


def _pages(pages_RP: np.ndarray, device: torch.device) -> Tensor | slice:
    """The pages of a lone segment are read in place if they lie side by side."""
    first = int(pages_RP[0, 0])
    if len(pages_RP) == 1 and bool((pages_RP[0] == np.arange(first, first + pages_RP.shape[1])).all()):
        return slice(first, first + pages_RP.shape[1])
    return torch.from_numpy(pages_RP.ravel().astype(np.int64)).to(device)


class PassOutputs(NamedTuple):
    """What a pass gives of the tokens whose logits are wanted: logits [N, V] and, where they are asked for,
    the last hidden states [N, H], what the output head gets after the final norm."""

    logits_NV: Tensor
    hidden_NH: Tensor | None


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
    """The segments of a flat batch as they are, and its tokens' places in the cache, int64 [T];
    ``page_table`` as of :func:`slot_mapping`."""
    segments = Segments.of(batch)
    num_pages = -(-int(segments.num_keys_S.max()) // page_size)
    table_SP = page_table[batch.slots_T[segments.starts_S], :num_pages]
    index_T, table, used_S, query_starts_S1 = upload(
        device,
        slot_mapping(batch, page_table, page_size),
        table_SP.astype(np.int64),
        segments.num_keys_S,
        np.append(segments.starts_S, len(batch)),
    )
    paged = PagedSegments(
        block_table_SP=table.int(),
        used_S=used_S.int(),
        query_starts_S1=query_starts_S1.int(),
        num_queries=int(segments.lengths_S.max()),
        num_keys=int(segments.num_keys_S.max()),
    )
    return paged, index_T


def aligned(length: int) -> int:
    """The room of a part of a packed tensor."""
    return -(-length // ALIGNMENT) * ALIGNMENT
