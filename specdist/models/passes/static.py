"""Passes of fixed shapes, padded up to a bucket, so that they can be recorded once and replayed.

A pass of few tokens is bound by launching its kernels, unless a recorded pass is replayed; a recording always
runs with the same shapes, at the same addresses. So the tokens of a batch are laid out as they are, segment
after segment, in buffers that are never moved: single steps, verification blocks and prompt chunks in the
same pass. What is padded is the number of tokens and the number of segments. The padding tokens form
segments of their own that read and write a scratch page, which belongs to no sequence; their output is
dropped.

T tokens, S segments, P pages per segment, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import (
    AttentionCall,
    GroupedAttention,
    LayerAttention,
    rotated_by,
)
from specdist.models.attention.kernel import KernelAttention, PagedKernel
from specdist.models.batch.flat import (
    FlatBatch,
    PagedSegments,
    Segments,
    aligned,
    previous_slots,
    slot_mapping,
)
from specdist.models.passes.graphs import CheckedGraphs, CudaGraphs, Difference, InputStaging
from specdist.models.passes.model_cache import ModelCache
from specdist.models.recurrent.states import NOT_KEPT, NUM_STATE_ARGUMENTS, StateArguments, StatePass
from specdist.sampling.distributions import with_next_tokens

# Longer passes are bound by their products: launching the kernels takes less time than running them.
MAX_TOKENS = 2048
# Up to so many tokens a pass is bound by reading the weights, and padding is free. Above, every octave has
# four buckets: at most a fourth of a pass is padding, a tenth on average.
FREE_TOKENS = 128
BUCKETS_PER_OCTAVE = 4
# Keys bound the width of the table of pages, and how many programs look for keys: coarse buckets cost little.
MIN_KEYS = 1024
KEYS_FACTOR = 4
# Longest segments for which attention has tiles of its own; with a longer one it has those of whole prompts.
MAX_FEW_QUERIES = 8


@dataclass(frozen=True)
class CarriedStates:
    """A pass of a drafter, each of whose tokens reads the state of the one before it.

    Attributes:
        before_T: where these states lie; after_N: where those that the pass puts out are written.
    """

    attention: LayerAttention
    before_T: Tensor
    after_N: Tensor

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        return self.attention.attend(layer, call)

    def rotate(self, layer: int, *tensors: Tensor) -> tuple[Tensor, Tensor] | None:
        return rotated_by(self.attention, layer, *tensors)


RunModel = Callable[[Tensor, Tensor, Tensor, LayerAttention, Tensor | None], Tensor]


class Bucket(NamedTuple):
    """The shape of a static pass, whose last segments are padding; none has more than ``num_queries``."""

    num_tokens: int
    num_segments: int
    num_pages: int
    num_logits: int
    num_queries: int
    has_windowed: bool = False
    has_states: bool = False
    has_carried: bool = False

    @property
    def part_lengths(self) -> list[int]:
        """Lengths of the packed inputs: token ids, positions, logits index, places of states that a drafter
        reads and writes, cache indices, used keys, first queries, what recurrent layers are told, block
        table; cache indices and tables of windowed layers also, if they have pages of their own."""
        lengths = [
            *2 * [self.num_tokens],
            self.num_logits,
            self.has_carried * self.num_tokens,
            self.has_carried * self.num_logits,
            *self.num_groups * [self.num_tokens],
            self.num_segments,
            self.num_segments + 1,
            self.has_states * NUM_STATE_ARGUMENTS * self.num_segments,
            *self.num_groups * [self.num_segments * self.num_pages],
        ]
        return [aligned(length) for length in lengths]

    @property
    def num_groups(self) -> int:
        """The number of groups of layers with pages of their own."""
        return 2 if self.has_windowed else 1


def choose_bucket(segments: Segments, num_logits: int, *, page_size: int, table_width: int) -> Bucket | None:
    """The smallest bucket that holds the segments; None if there are too many tokens.

    Ranks that share a model must make the same choice, or their collectives would not match: nothing here
    depends on the device.

    Args:
        table_width: most pages of a slot.
    """
    num_tokens = bucket_of_tokens(int(segments.lengths_S.sum()))
    if num_tokens > MAX_TOKENS:
        return None
    num_keys = MIN_KEYS
    while num_keys < segments.num_keys_S.max():
        num_keys *= KEYS_FACTOR
    num_segments = _power_of_two(len(segments.lengths_S))
    num_queries = _power_of_two(int(segments.lengths_S.max()))
    if num_queries > MAX_FEW_QUERIES:
        num_queries = num_tokens
    # Half of the tokens may be padding.
    num_padding = num_tokens - max(num_segments, num_tokens // 2)
    return Bucket(
        num_tokens=num_tokens,
        num_segments=num_segments + max(1, -(-num_padding // num_queries)),
        num_pages=min(-(-num_keys // page_size), table_width),
        num_logits=min(bucket_of_tokens(max(1, num_logits)), num_tokens),
        num_queries=num_queries,
    )


def bucket_of_tokens(number: int) -> int:
    """The smallest bucket for so many tokens: a power of two, or above ``FREE_TOKENS`` one of the steps
    between."""
    if number <= FREE_TOKENS:
        return _power_of_two(number)
    step = _power_of_two(number) // 2 // BUCKETS_PER_OCTAVE
    return -(-number // step) * step


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def pack_told(room: np.ndarray, num_segments: int, told: StateArguments) -> None:
    """Padding has no tokens and leaves nothing."""
    room.fill(0)
    told_5S = room[: NUM_STATE_ARGUMENTS * num_segments].reshape(NUM_STATE_ARGUMENTS, num_segments)
    told_5S[-1] = NOT_KEPT
    told_5S[:, : len(told.slots_S)] = told


def run_once(
    graphs: CheckedGraphs,
    key: Hashable,
    function: Callable[[], Tensor],
    told: Sequence[Tensor],
    difference: Difference | None = None,
) -> Tensor:
    """Run as :meth:`CheckedGraphs.run` does, a function that leaves states as ``told``, [5, ...] each. To
    record it takes several runs, of which only the last one may leave anything."""
    if told and not graphs.is_settled(key):
        kept = [each[-1].clone() for each in told]
        for each in told:
            each[-1].fill_(NOT_KEPT)
        graphs.run(key, function, difference)
        for each, right in zip(told, kept, strict=True):
            each[-1].copy_(right)
    return graphs.run(key, function, difference)


class StaticPasses:
    """The static passes of one runner, which share their buffers."""

    def __init__(
        self,
        run_model: RunModel,
        cache: ModelCache,
        kernel: PagedKernel,
        *,
        device: torch.device,
        capturer: CudaGraphs | None,
        takes_features: bool = False,
        num_more_inputs: int = 0,
        no_state: int | None = None,
    ) -> None:
        """
        Args:
            run_model: (token ids [T], positions [T], logits index [N], attention, features [3, N]) to logits
                [N, V].
            capturer: None runs every pass unrecorded.
            takes_features: ``run_model`` gets features of the tokens whose logits are wanted; else None.
            num_more_inputs: room for inputs besides those of a pass.
            no_state: where a drafter finds a state that is never written; None for other models.
        """
        self.no_state = no_state
        self.run_model = run_model
        self.page_table, self.cache, self.states = cache.table, cache.key_value, cache.states
        self.scratch_page, self.windowed_scratch_page = cache.scratch_page, cache.windowed_scratch_page
        self.kernel = kernel
        self.device = device
        most_segments, self.table_width = cache.table.pages.shape
        self._graphs = CheckedGraphs(capturer)
        num_segments = _power_of_two(most_segments)
        num_segments += max(1, num_segments // 2)
        sizes = MAX_TOKENS, num_segments, self.table_width, MAX_TOKENS, MAX_TOKENS
        largest = self._with_parts(Bucket(*sizes))
        self.staging = InputStaging(sum(largest.part_lengths) + num_more_inputs, device)
        # They may be on the device already, so they are not among the staged inputs.
        self.features_3N = torch.zeros(3, MAX_TOKENS, device=device) if takes_features else None

    def forward(
        self,
        batch: FlatBatch,
        logits_index: np.ndarray,
        page_table: np.ndarray,
        features_3N: Tensor | None = None,
        *,
        is_copied: bool = True,
    ) -> Tensor | None:
        """Logits [N, V] as of :meth:`specdist.models.passes.runner.ModelRunner.forward`; None if no bucket
        fits."""
        segments = Segments.of(batch)
        bucket = self.choose_bucket(segments, len(logits_index))
        if bucket is None:
            return None
        self.pack(bucket, batch, segments, logits_index, page_table)
        self.send(bucket, batch, features_3N)
        told = [] if self.states is None else [self.told_of(bucket)]
        logits = run_once(self._graphs, bucket, lambda: self.compute(bucket), told)
        # A replay of another pass may write to the same memory.
        logits = logits[: len(logits_index)]
        return logits.clone() if is_copied else logits

    def choose_bucket(self, segments: Segments, num_logits: int) -> Bucket | None:
        page_size = self.cache.page_size
        bucket = choose_bucket(segments, num_logits, page_size=page_size, table_width=self.table_width)
        return bucket and self._with_parts(bucket)

    def _with_parts(self, bucket: Bucket) -> Bucket:
        has_windowed = self.windowed_scratch_page is not None
        return bucket._replace(
            has_windowed=has_windowed,
            has_states=self.states is not None,
            has_carried=self.no_state is not None,
        )

    def pack(
        self,
        bucket: Bucket,
        batch: FlatBatch,
        segments: Segments,
        logits_index: np.ndarray,
        page_table: np.ndarray,
        num_more_keys_S: np.ndarray | int = 0,
    ) -> None:
        """Write the padded inputs of a pass into the host's buffer; ``num_more_keys``: whose pages the table
        has, too."""
        host, ends, num_groups = self.staging.host(), np.cumsum(bucket.part_lengths), bucket.num_groups
        token_ids, positions, logits, before, after, *parts = (host[a:b] for a, b in pairwise([0, *ends]))
        (used, starts, told), tables = parts[num_groups : num_groups + 3], parts[-num_groups:]
        num_tokens, num_segments = len(batch), len(segments.lengths_S)
        if self.states is not None:
            firsts_S = segments.starts_S
            planned = self.states.plan(
                batch.slots_T[firsts_S], batch.positions_T[firsts_S], segments.lengths_S
            )
            pack_told(told, bucket.num_segments, planned)
        token_ids.fill(0)
        if not isinstance(batch.token_ids_T, Tensor):
            token_ids[:num_tokens] = batch.token_ids_T
        positions.fill(0)
        positions[:num_tokens] = batch.model_positions_T
        # The first token's logits are repeated; if none are wanted, nobody reads them.
        logits.fill(0)
        logits[: len(logits_index)] = logits_index
        # A padding segment has one key, so that its attention is finite, and is no longer than others.
        used.fill(1)
        used[:num_segments] = segments.num_keys_S
        starts[:num_segments] = segments.starts_S
        starts[num_segments:] = num_tokens + bucket.num_queries * np.arange(len(starts) - num_segments)
        np.minimum(starts, bucket.num_tokens, out=starts)
        num_keys_S = segments.num_keys_S + num_more_keys_S
        is_used_SP = np.arange(bucket.num_pages) * self.cache.page_size < num_keys_S[:, None]
        groups = [(page_table, self.scratch_page), (batch.windowed_pages_SP, self.windowed_scratch_page)]
        for (pages, scratch_page), cache_index, table in zip(groups, parts, tables, strict=False):
            assert pages is not None and scratch_page is not None
            self._pack_table(bucket, batch, segments, is_used_SP, pages, scratch_page, cache_index, table)
        if self.no_state is not None:
            before.fill(self.no_state)
            before[:num_tokens] = previous_slots(batch, page_table, self.cache.page_size, self.no_state)
            after.fill(self.scratch_page * self.cache.page_size)
            after[: len(logits_index)] = parts[0][logits_index]

    def _pack_table(
        self, bucket: Bucket, batch: FlatBatch, segments: Segments, is_used_SP: np.ndarray,
        page_table: np.ndarray, scratch_page: int, cache_index: np.ndarray, table: np.ndarray,
    ) -> None:  # fmt: skip
        """Pack the table of a group of layers."""
        page_size = self.cache.page_size
        cache_index[:] = scratch_page * page_size + np.arange(len(cache_index)) % page_size
        cache_index[: len(batch)] = slot_mapping(batch, page_table, page_size)
        table_SP = table[: bucket.num_segments * bucket.num_pages].reshape(bucket.num_segments, -1)
        table_SP.fill(scratch_page)
        pages_SP = page_table[batch.slots_T[segments.starts_S], : bucket.num_pages]
        table_SP[: len(segments.lengths_S)] = np.where(is_used_SP, pages_SP, scratch_page)

    def send(
        self, bucket: Bucket, batch: FlatBatch, features_3N: Tensor | None, num_more_inputs: int = 0
    ) -> None:
        """Copy the inputs to the device, with so many more after those of a pass."""
        buffer = self.staging.send(sum(bucket.part_lengths) + num_more_inputs)
        if isinstance(batch.token_ids_T, Tensor):
            buffer[: len(batch)] = batch.token_ids_T
        if self.features_3N is not None and features_3N is not None:
            self.features_3N[:, : features_3N.shape[1]] = features_3N

    def table_of(self, bucket: Bucket, group: int = 0) -> Tensor:
        """The pages of the segments [S, P] in the device's buffer; ``group`` 1: of windowed layers."""
        num_segments, num_pages = bucket.num_segments, bucket.num_pages
        table = self._parts_of(bucket)[group - bucket.num_groups]
        return table[: num_segments * num_pages].view(num_segments, num_pages)

    def told_of(self, bucket: Bucket) -> Tensor:
        """What recurrent layers are told [5, S], in the device's buffer."""
        told = self._parts_of(bucket)[-1 - bucket.num_groups]
        return told[: NUM_STATE_ARGUMENTS * bucket.num_segments].view(NUM_STATE_ARGUMENTS, -1)

    def _parts_of(self, bucket: Bucket) -> tuple[Tensor, ...]:
        return self.staging.buffer[: sum(bucket.part_lengths)].split(bucket.part_lengths)

    def with_states(self, attention: LayerAttention, told_5S: Tensor, num_tokens: int) -> LayerAttention:
        """A pass whose recurrent layers are told so much."""
        assert self.states is not None
        return StatePass(attention, self.states, self.states.recorded_places(told_5S, num_tokens))

    def after_of(self, bucket: Bucket) -> Tensor:
        """Where a drafter's states are written [N], in the device's buffer."""
        return self._parts_of(bucket)[4][: bucket.num_logits].long()

    @torch.inference_mode()
    def compute(self, bucket: Bucket, drawn_W: Tensor | None = None) -> Tensor:
        """The pass over the buffer's contents, and next tokens. No shape depends on them."""
        packed = self.staging.buffer[: sum(bucket.part_lengths)]
        lengths, num_groups = bucket.part_lengths, bucket.num_groups
        used, starts = packed.split(lengths)[5 + num_groups : 7 + num_groups]
        num_indices = sum(lengths[: 5 + num_groups])
        token_ids, positions, logits_index, before, after, *indices = (
            packed[:num_indices].long().split(lengths[: 5 + num_groups])
        )
        if drawn_W is not None:
            token_ids = with_next_tokens(token_ids, drawn_W)
        attentions = [
            KernelAttention(
                self.cache,
                self.kernel,
                PagedSegments(
                    block_table_SP=self.table_of(bucket, group),
                    used_S=used[: bucket.num_segments],
                    query_starts_S1=starts[: bucket.num_segments + 1],
                    num_queries=bucket.num_queries,
                    num_keys=bucket.num_pages * self.cache.page_size,
                ),
                cache_index[: bucket.num_tokens],
            )
            for group, cache_index in enumerate(indices)
        ]
        attention: LayerAttention = attentions[0]
        if bucket.has_windowed:
            attention = GroupedAttention(self.cache.windowed, attentions[1], attentions[0])
        if self.states is not None:
            attention = self.with_states(attention, self.told_of(bucket), bucket.num_tokens)
        num_logits = bucket.num_logits
        if bucket.has_carried:
            attention = CarriedStates(attention, before[: bucket.num_tokens], after[:num_logits])
        features_3N = None if self.features_3N is None else self.features_3N[:, :num_logits]
        return self.run_model(
            token_ids[: bucket.num_tokens],
            positions[: bucket.num_tokens],
            logits_index[:num_logits],
            attention,
            features_3N,
        )
