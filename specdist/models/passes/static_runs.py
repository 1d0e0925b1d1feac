"""Runs of draft steps that a device takes by itself: pass, distribution, draw, and the next pass over what
was drawn, recorded together and replayed as one; and before them the draw of next tokens that they read.

The first pass is a static pass (:mod:`specdist.models.passes.static`) with the same inputs, of which each
sequence has one segment. The passes after it have one token of each sequence. Where they read and write is
computed on the host and sent with the inputs; random numbers are computed on the device, from the same
counters as on the host. A sequence that takes fewer steps than others, and padding, writes into the scratch
page.

A sequences, S the same with padding, D steps, C columns, W next tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import LayerAttention
from specdist.models.attention.kernel import KernelAttention
from specdist.models.batch.flat import (
    FlatBatch,
    PagedSegments,
    Segments,
    aligned,
    for_layers,
    model_positions,
    slot_mapping,
)
from specdist.models.passes.graphs import CheckedGraphs, CudaGraphs
from specdist.models.passes.hidden import HiddenStateHead
from specdist.models.passes.static import Bucket, CarriedStates, StaticPasses, bucket_of_tokens, run_once
from specdist.models.recurrent.states import NOT_KEPT, NUM_STATE_ARGUMENTS, RecurrentStates
from specdist.sampling.branch_estimates import DraftDraws
from specdist.sampling.distributions import Dense, NextDraws, recovered_distributions
from specdist.sampling.random import Purpose, RandomKeys, uniforms
from specdist.utils.trial import tolerance_of

# Steps of a recorded run. Each number has graphs of its own.
RECORDED_LENGTHS = (1, 2, 4, 8)
LONGEST_RUN = RECORDED_LENGTHS[-1]
# Beside those of single passes. What would need more takes single passes.
MAX_RUN_GRAPHS = 80
# Numbers of int32: streams, positions and misses of the sequences' random numbers have eight bytes; so have
# those of next tokens, whether one was rejected there, and the lines of P and Q.
NUM_KEYS, KEY_NUMBERS = 3 + 4, 2
# Columns of a step besides token ids. They are compared where the tokens drawn before are the same.
LEAST_EQUAL_DRAWS = 0.5


class DraftedRun(NamedTuple):
    """``columns_DCA``, float64: of each step the drawn ids, their probabilities, their features if they are
    kept, and a head's estimates; ``scores_DSV``: with padding, if they are kept, until the next run."""

    columns_DCA: Tensor
    scores_DSV: Tensor


class _Inputs(NamedTuple):
    """Inputs of all passes but the first: [D - 1, S]; ``starts``: [S + 1]; ``keys``: int64 [7, S], 3 of
    first draws and 4 of next tokens; ``told``: to recurrent layers, [5, D - 1, S] or nothing."""

    positions: Tensor
    cache_index: Tensor
    used: Tensor
    starts: Tensor
    keys: Tensor
    told: Tensor


def lengths_of(num_rows: int, num_steps: int, has_states: bool = False) -> list[int]:
    """Lengths of the parts of :class:`_Inputs`, in int32, rounded up as those of a pass."""
    room, num_passes = aligned(num_rows), num_steps - 1
    told = has_states * NUM_STATE_ARGUMENTS * num_passes * room
    return [*3 * [num_passes * room], aligned(num_rows + 1), NUM_KEYS * KEY_NUMBERS * room, told]


def num_run_inputs(num_slots: int, has_states: bool = False) -> int:
    """Most inputs that a run has besides those of its first pass."""
    return sum(lengths_of(bucket_of_tokens(num_slots), LONGEST_RUN, has_states))


class StaticRuns:
    """The recorded runs of one runner."""

    def __init__(
        self,
        passes: StaticPasses,
        capturer: CudaGraphs | None,
        dtype: torch.dtype,
        head: HiddenStateHead | None = None,
        on_pass: Callable[[], None] | None = None,
        rope_border: int | None = None,
    ) -> None:
        """
        Args:
            dtype: of the model; ``head``: that its passes run; ``on_pass``: called after a run.
            rope_border: of the model.
        """
        self._rope_border = rope_border
        self._passes = passes
        self._table = passes.page_table
        self._on_pass = on_pass or (lambda: None)
        self._tolerance = tolerance_of("pass", dtype)
        self._head = head
        self._graphs = CheckedGraphs(capturer, MAX_RUN_GRAPHS)
        # What the largest run so far needed; what each graph reads of next tokens; where it writes scores.
        self._newest: dict[Hashable, Tensor] = {}
        self._next: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._scores: dict[Hashable, Tensor] = {}

    @torch.inference_mode()
    def run(
        self,
        batch: FlatBatch,
        num_steps_A: np.ndarray,
        keys: RandomKeys,
        draws: DraftDraws,
        features_3A: Tensor | None = None,
        next_draws: NextDraws | None = None,
    ) -> DraftedRun | None:
        """Draft a run; None if the steps have to be taken one by one.

        Args:
            batch: what the sequences' caches lack, one segment each; tokens are drawn after its last tokens.
            num_steps_A: of each sequence; the largest is one of those that are recorded.
            keys: of the first token that each sequence draws.
            features_3A: of the last tokens of ``batch``, for a head that uses them.
            next_draws: of next tokens whose placeholders are in ``batch``: they get the tokens.
        """
        segments, num_steps, num_rows = Segments.of(batch), int(num_steps_A.max()), len(num_steps_A)
        ends_A = segments.starts_S + segments.lengths_S - 1
        slots_A, num_more_keys_A = batch.slots_T[ends_A], num_steps_A - 1
        last_keys_A = segments.num_keys_S + num_more_keys_A
        bucket = self._passes.choose_bucket(dataclasses.replace(segments, num_keys_S=last_keys_A), num_rows)
        num_next = 0 if next_draws is None else len(next_draws.slots_W)
        key = bucket, num_steps, draws, num_next > 0
        has_room = self._graphs.is_known(key) or not self._graphs.is_full
        if bucket is None or num_next > bucket.num_logits or not has_room:
            return None
        batch = for_layers(batch, self._table, self._rope_border)
        self._passes.pack(bucket, batch, segments, ends_A, self._table.pages, num_more_keys_A)
        num_inputs = self._pack(bucket, slots_A, segments.num_keys_S, num_steps_A, keys, next_draws)
        self._passes.send(bucket, batch, features_3A, num_inputs)
        is_new = key not in self._scores
        if next_draws is not None:
            both = next_draws.target_W.matrix_MV, next_draws.scores_MV
            if is_new:
                memory = self._memory("next", (2, bucket.num_logits, draws.vocab_size), both[0])
                self._next[key] = memory, self._inputs(bucket, num_steps).keys[-2:]
            for whole_MV, own_SV, lines_S in zip(both, *self._next[key], strict=True):
                torch.index_select(whole_MV, 0, lines_S[:num_next], out=own_SV[:num_next])
        told: list[Tensor] = []
        if self._passes.states is not None:
            told = [self._passes.told_of(bucket), self._inputs(bucket, num_steps).told]
        difference = partial(difference_of_runs, num_steps_A=num_steps_A, tolerance=self._tolerance)
        compute = partial(self._compute, key, bucket, num_steps, draws)
        take_steps = partial(run_once, self._graphs, key, compute, told, difference)
        columns = take_steps()
        if is_new and not told:
            # To record a run takes several, and rounding may decide otherwise in one of them: what was drawn,
            # its scores and what the cache has of it must be of the same one.
            columns = take_steps()
        self._on_pass()
        # The next run writes to the same memory.
        columns = columns.clone()
        if next_draws is not None:
            next_draws.token_ids_W = columns[-1, :num_next]
        return DraftedRun(steps_of(columns, num_steps)[:, :, :num_rows], self._scores[key])

    def _pack(
        self,
        bucket: Bucket,
        slots_A: np.ndarray,
        num_keys_A: np.ndarray,
        num_steps_A: np.ndarray,
        keys: RandomKeys,
        next_draws: NextDraws | None,
    ) -> int:
        """Write the inputs of a run after those of its first pass; returns their number."""
        passes, num_steps, num_rows = self._passes, int(num_steps_A.max()), len(num_steps_A)
        lengths = lengths_of(bucket.num_logits, num_steps, bucket.has_states)
        first = sum(bucket.part_lengths)
        host, ends = passes.staging.host(), np.cumsum([first, *lengths])
        positions, cache_index, used, starts, key_words, told = (host[a:b] for a, b in pairwise(ends))
        page_size = passes.cache.page_size
        places = np.arange(len(cache_index)) % page_size
        positions.fill(0)
        cache_index[:] = passes.scratch_page * page_size + places
        # So that the attention of whoever takes no part is finite.
        used.fill(1)
        starts[:] = np.arange(len(starts))
        steps, rows = np.nonzero(np.arange(1, num_steps)[:, None] < num_steps_A)
        # The token that the step before has drawn stands after the keys of that step's pass.
        positions_T = num_keys_A[rows] + steps
        lines = steps * aligned(bucket.num_logits) + rows
        drawn = FlatBatch(positions_T, slots_A[rows], positions_T)
        positions[lines] = model_positions(drawn.slots_T, positions_T, self._table, self._rope_border)
        cache_index[lines] = slot_mapping(drawn, self._table.pages, page_size)
        used[lines] = positions_T + 1
        if passes.states is not None and len(told):
            self._pack_told(passes.states, told, slots_A, num_keys_A, num_steps_A)
        words = np.zeros((NUM_KEYS, len(key_words) // (NUM_KEYS * KEY_NUMBERS)), np.int64)
        words[:3, :num_rows] = keys.stream_keys_N, keys.positions_N, keys.num_misses_N
        if next_draws is not None:
            numbers_W = next_draws.keys_W.uniforms(Purpose.NEXT_TOKEN).numpy().view(np.int64)
            given, all_W = (next_draws.target_W.lines_N, next_draws.lines_W), np.arange(len(numbers_W))
            target_W, draft_W = (all_W if lines_W is None else lines_W for lines_W in given)
            words[3:, : len(numbers_W)] = numbers_W, draft_W >= 0, target_W, np.maximum(draft_W, 0)
        key_words[:] = words.view(np.int32).ravel()
        return sum(lengths)

    @staticmethod
    def _pack_told(
        states: RecurrentStates,
        room: np.ndarray,
        slots_A: np.ndarray,
        num_keys_A: np.ndarray,
        num_steps_A: np.ndarray,
    ) -> None:
        """Pack what recurrent layers are told in all passes but the first. Who takes no part begins a
        sequence, and leaves nothing."""
        told_5DS = room.reshape(NUM_STATE_ARGUMENTS, int(num_steps_A.max()) - 1, -1)
        told_5DS[:] = np.array([0, 0, 1, 0, NOT_KEPT])[:, None, None]
        for step in range(1, num_steps_A.max()):
            rows = np.flatnonzero(step < num_steps_A)
            positions = num_keys_A[rows] + step - 1
            told_5DS[:, step - 1, rows] = states.plan(slots_A[rows], positions, np.ones_like(positions))

    def _inputs(self, bucket: Bucket, num_steps: int) -> _Inputs:
        """Views of the device's buffer."""
        num_rows, room = bucket.num_logits, aligned(bucket.num_logits)
        lengths = lengths_of(num_rows, num_steps, bucket.has_states)
        first = sum(bucket.part_lengths)
        *parts, starts, keys, told = self._passes.staging.buffer[first : first + sum(lengths)].split(lengths)
        positions, cache_index, used = (part.view(num_steps - 1, room)[:, :num_rows] for part in parts)
        keys_7S = keys.view(torch.int64).view(NUM_KEYS, -1)[:, :num_rows]
        told_5DS = told.view(NUM_STATE_ARGUMENTS, num_steps - 1, bucket.has_states * room)[:, :, :num_rows]
        return _Inputs(positions, cache_index, used, starts[: num_rows + 1], keys_7S, told_5DS)

    @torch.inference_mode()
    def _compute(self, key: Hashable, bucket: Bucket, num_steps: int, draws: DraftDraws) -> Tensor:
        """[D × C + 1, S]: the columns of all steps, and next tokens, if any. Scores have their own memory."""
        passes, num_rows = self._passes, bucket.num_logits
        inputs = self._inputs(bucket, num_steps)
        positions, cache_index = inputs.positions.long(), inputs.cache_index.long()
        stream_keys_S, firsts_S, num_misses_S, numbers_S, is_rejected_S = inputs.keys[:5]
        drawn_positions_DS = firsts_S + torch.arange(num_steps, device=firsts_S.device)[:, None]
        uniforms_DS = None
        if draws.settings.is_random:
            uniforms_DS = uniforms(stream_keys_S, drawn_positions_DS, num_misses_S, Purpose.DRAFT)
        lines_S = torch.arange(num_rows, device=firsts_S.device)
        next_ids_S: Tensor | None = None
        if key in self._next:
            target_SV, draft_SV = self._next[key][0]
            draft_S = Dense(draft_SV.where(is_rejected_S[:, None] > 0, 0.0))
            next_ids_S = recovered_distributions(Dense(target_SV), draft_S).draw(numbers_S.view(torch.double))
        table_SP = passes.table_of(bucket)[:num_rows]
        columns: list[Tensor] = []
        outputs, ids_S, features_3S = passes.compute(bucket, next_ids_S), lines_S, None
        for step in range(num_steps):
            if step:
                segments = PagedSegments(
                    block_table_SP=table_SP,
                    used_S=inputs.used[step - 1],
                    query_starts_S1=inputs.starts,
                    num_queries=1,
                    num_keys=table_SP.shape[1] * passes.cache.page_size,
                )
                attention: LayerAttention = KernelAttention(
                    passes.cache, passes.kernel, segments, cache_index[step - 1]
                )
                if passes.states is not None:
                    attention = passes.with_states(attention, inputs.told[:, step - 1], num_rows)
                if bucket.has_carried:
                    written_S = passes.after_of(bucket) if step == 1 else cache_index[step - 2]
                    attention = CarriedStates(attention, written_S, cache_index[step - 1])
                told_3S = None if passes.features_3N is None else features_3S
                outputs = passes.run_model(ids_S, positions[step - 1], lines_S, attention, told_3S)
            uniforms_S = None if uniforms_DS is None else uniforms_DS[step]
            drawn = draws.draw(outputs, stream_keys_S, drawn_positions_DS[step], uniforms_S)
            ids_S, _, features_3S, scores_SV = drawn
            columns += [ids_S.double(), drawn.probabilities_N]
            columns += [] if features_3S is None else features_3S.double().unbind()
            columns += [] if self._head is None else [self._head.estimates_of(outputs, features_3S)]
            if not step:
                shape = draws.keeps_scores * num_steps, *scores_SV.shape
                self._scores[key] = self._memory("scores", shape, scores_SV)
            if draws.keeps_scores:
                self._scores[key][step].copy_(scores_SV)
        return torch.stack([*columns, columns[0] if next_ids_S is None else next_ids_S.double()])

    def _memory(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Outside of all graphs; those that were recorded earlier keep using the smaller one."""
        place, size = (name, like.dtype), int(np.prod(shape))
        held = self._newest.get(place)
        if held is None or len(held) < size:
            held = self._newest[place] = like.new_empty(size)
        return held[:size].view(shape)


def steps_of(columns: Tensor, num_steps: int) -> Tensor:
    """[D, C, S]: the columns of a run's steps, without the next tokens."""
    return columns[:-1].view(num_steps, -1, columns.shape[1])


def difference_of_runs(
    found: Tensor, expected: Tensor, num_steps_A: np.ndarray, tolerance: float
) -> tuple[float, float]:
    """The difference, as of a graph's replay, from columns [D × C + 1, S]. Where two tokens are nearly
    equally likely, rounding decides, and what follows is not compared; but most first draws must be equal.
    Nor is compared what takes no part in a step: it reads what earlier runs have left in the scratch page."""
    num_steps, num_rows = int(num_steps_A.max()), len(num_steps_A)
    found_DCA, expected_DCA = (steps_of(columns, num_steps)[:, :, :num_rows] for columns in (found, expected))
    is_equal_DA = (found_DCA[:, 0] == expected_DCA[:, 0]).cumprod(dim=0).bool()
    if is_equal_DA[0].float().mean() < LEAST_EQUAL_DRAWS:
        return torch.inf, 0.0
    takes_part_DA = np.arange(num_steps)[:, None] < num_steps_A
    is_compared_DA = is_equal_DA & torch.from_numpy(takes_part_DA).to(found.device)
    differences = (found_DCA - expected_DCA).abs()
    differences.masked_fill_((found_DCA == expected_DCA) | (found_DCA.isnan() & expected_DCA.isnan()), 0.0)
    compared = differences.masked_fill(~is_compared_DA[:, None], 0.0)
    largest = max(1.0, float(expected_DCA.nan_to_num(0.0, 0.0, 0.0)[:, 1:].abs().max()))
    return float(compared.max()), tolerance * largest
