"""What recurrent layers keep of each sequence, in the place of keys and values, with exact rollback.

A state is a sum over all tokens so far, and no token can be taken out of it again. So a slot keeps the state
after all tokens but the last few, which may still be rolled back, and of these what the layer needs to run
them: their *rows*, a few kilobytes each, where a copy of the state would take megabytes. A pass runs the rows
that are still valid once more, then its own tokens, and leaves the state after those that no later pass can
take back (:class:`specdist.models.cache.prefix_states.Rollback`).

Positions alone decide. A pass whose tokens begin at a position keeps the rows before it and drops those after
it; a sequence's first token begins without a state. So engine and draft need to say nothing of acceptance:
as with pages, what has been rolled back is overwritten.

A pass lays its rows out in one line of places: of each segment those that come before its own, as many of
every one, then its own. Where they are follows from a few numbers of each segment
(:class:`StateArguments`), on the device, too, so that a recorded pass is right for whatever was accepted.

T flat tokens, S segments, L places with rows, N places that are run (all but the first few), C places of a
segment before its own, R numbers of a row, B branches, P places of the longest of some segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.attention.attention import LayerAttention, rotated_by
from specdist.models.batch.flat import FlatBatch, Segments
from specdist.models.cache.key_value import untouched_zeros
from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.prefix_states import Rollback
from specdist.models.recurrent.kernels import kernels_on
from specdist.models.recurrent.mixers import Mixer
from specdist.models.recurrent.runs import STATE_DTYPE, Runs, StateShape, padded_of

NO_COPIES = np.zeros((3, 0), np.int64)


class StateArguments(NamedTuple):
    """What a pass is told of its segments, integers on the host or on the device: the slots of their
    sequences, the positions of their first tokens, their numbers of tokens, and how many of the sequence's
    tokens the slot's state is after, before the pass and after it. With :data:`NOT_KEPT` the pass leaves the
    slot as it is."""

    slots_S: Any
    begins_S: Any
    lengths_S: Any
    applied_S: Any
    kept_S: Any


NUM_STATE_ARGUMENTS = len(StateArguments._fields)
NOT_KEPT = -1


class Line(NamedTuple):
    """Where a pass's rows are.

    Attributes:
        ring_B: places in the ring of the rows that come before any segment's own; ``before_B``: where they
            are laid out.
        new_T: where the tokens' own rows are laid out; ``ring_T``: their places in the ring.
        outputs_T: where among the places that are run the tokens' outputs are.
    """

    ring_B: Tensor
    before_B: Tensor
    new_T: Tensor
    ring_T: Tensor
    outputs_T: Tensor


class Places(NamedTuple):
    """The places of a pass, on the device, with all segments."""

    line: Line
    runs: Sequence[Runs]


class RecurrentStates:
    """The memory of all slots, and which tokens each one's state and rows are of.

    Attributes:
        rows: of each layer, [slots × places of a ring + 2, R]: the last two are zeros, and what nobody reads.
        states: of each layer, float32 [slots, ...].
        num_before: of each segment the first places are only read by a convolution.
        room: of each segment, before its own.
    """

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        *,
        num_slots: int,
        rollback: Rollback,
        dtype: torch.dtype,
        device: torch.device,
        num_kept: int = 0,
    ) -> None:
        """``num_kept``: more states, that no pass runs: :meth:`update`."""
        num_slots, self._num_run = num_slots + num_kept, num_slots
        self._rollback, self._device = rollback, device
        self.num_before = max(shape.num_before for shape in shapes.values())
        self._ring = self.room = rollback.num_tokens + self.num_before
        self.rows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        self._num_rows = num_slots * self._ring
        for layer, shape in shapes.items():
            self.rows[layer] = untouched_zeros((self._num_rows + 2, shape.row_width), dtype, device)
            if shape.state:
                self.states[layer] = untouched_zeros((num_slots, *shape.state), STATE_DTYPE, device)
        self.has_kernels = bool(self.states) and kernels_on(device) is not None
        # The state is after so many tokens, and the rows reach up to these.
        self._applied, self._ends = np.zeros((2, num_slots), np.int64)
        # Slots whose states the next pass leaves to be kept, after how many tokens, and where; and the last.
        self._to_keep = self._left = NO_COPIES

    @property
    def can_be_recorded(self) -> bool:
        """Plain operations need the host."""
        return self.has_kernels or not self.states or self._device.type == "cpu"

    def rings(self, layer: int) -> Tensor:
        """Rows by slot, [slots, places, R]."""
        return self.rows[layer][: self._num_rows].unflatten(0, (-1, self._ring))

    def assume(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Let each slot be as if it had a state of so many tokens, for passes that are only timed."""
        self._applied[slots] = self._ends[slots] = lengths

    def copy(self, sources_B: np.ndarray, targets_B: np.ndarray) -> None:
        """Let slots have the states of others; no target is a source."""
        if not len(targets_B):
            return
        self._applied[targets_B], self._ends[targets_B] = self._applied[sources_B], self._ends[sources_B]
        sources, targets = (torch.from_numpy(slots).to(self._device) for slots in (sources_B, targets_B))
        for held in (*map(self.rings, self.rows), *self.states.values()):
            held.index_copy_(0, targets, held.index_select(0, sources))

    def update(self, updates: PageUpdates) -> PageUpdates:
        """Copy the states that are kept of the last pass, if it has run, and those that sequences of the next
        begin with. Returns the updates of pages."""
        is_copy = updates.slots < 0
        slots, _, kept = self._left
        self._left = self._to_keep = NO_COPIES
        self.copy(slots, self._num_run + kept)
        if not is_copy.any():
            return updates
        columns = updates.slots[is_copy], updates.indices[is_copy], updates.pages[is_copy]
        slots, lengths, kept = np.array(columns, np.int64)
        slots, is_end = -1 - slots, lengths > 0
        self._to_keep = np.array([slots, lengths, kept])[:, is_end]
        self.copy(self._num_run + kept[~is_end], slots[~is_end])
        return updates.where(~is_copy)

    def _leave(self) -> None:
        """The states to be kept are left by the pass that is planned."""
        slots, lengths, _ = self._left = self._to_keep
        if (self._ends[slots] != lengths).any():
            raise RuntimeError(f"slots {slots} end after {self._ends[slots]} tokens, not after {lengths}")

    def plan(self, slots_S: np.ndarray, begins_S: np.ndarray, lengths_S: np.ndarray) -> StateArguments:
        """Plan a pass over so many tokens of each slot, from these positions on; it is to be run before the
        next one is planned.

        Raises RuntimeError for tokens that a slot's state does not lead to.
        """
        ends_S = begins_S + lengths_S
        applied_S = np.where(begins_S, self._applied[slots_S], 0)
        is_wrong_S = (begins_S < applied_S) | ((begins_S > self._ends[slots_S]) & (begins_S > 0))
        if is_wrong_S.any():
            slot = int(slots_S[is_wrong_S][0])
            raise RuntimeError(
                f"slot {slot} has a state of {self._applied[slot]} tokens and rows up to {self._ends[slot]}, "
                f"which do not lead to a token at position {int(begins_S[is_wrong_S][0])}"
            )
        kept_S = np.maximum(applied_S, ends_S - self._rollback.num_tokens)
        if self._rollback.follows_committed:
            kept_S = np.maximum(kept_S, begins_S)
        self._applied[slots_S], self._ends[slots_S] = kept_S, ends_S
        self._leave()
        return StateArguments(slots_S, begins_S, lengths_S, applied_S, kept_S)

    def places(self, batch: FlatBatch) -> Places:
        """The places of a pass over these tokens, planned as by :meth:`plan`."""
        segments = Segments.of(batch)
        starts_S = segments.starts_S
        told = self.plan(batch.slots_T[starts_S], batch.positions_T[starts_S], segments.lengths_S)
        on_host = StateArguments(*(torch.from_numpy(each.astype(np.int64)) for each in told))
        line, numbers_5S = self._laid_out(on_host, len(batch))
        return Places(Line(*(each.to(self._device) for each in line)), self._runs(numbers_5S.numpy()))

    def recorded_places(self, told_5S: Tensor, num_tokens: int) -> Places:
        """The places of a pass whose numbers are on the device. No shape depends on them, and padding follows
        the last segment."""
        line, numbers_5S = self._laid_out(StateArguments(*told_5S.long()), num_tokens)
        is_alone = self.has_kernels or not self.states
        runs = [Runs(numbers_5S)] if is_alone else self._runs(numbers_5S.numpy())
        return Places(line, runs)

    def _laid_out(self, told: StateArguments, num_tokens: int) -> tuple[Line, Tensor]:
        """What :class:`Places` and :class:`Runs` have."""
        slots_S, begins_S, lengths_S, applied_S, kept_S = told
        device, ring, room = slots_S.device, self._ring, self.room
        ends_S = lengths_S.cumsum(0)
        starts_S, zero = ends_S - lengths_S, self._num_rows
        # The first place of each segment's own tokens.
        own_S = starts_S + room * torch.arange(1, len(slots_S) + 1, device=device)
        tokens_T = torch.arange(num_tokens, device=device)
        segment_T = torch.searchsorted(ends_S, tokens_T, right=True).clamp_(max=len(slots_S) - 1)
        offsets_T = tokens_T - starts_S[segment_T]
        positions_T = begins_S[segment_T] + offsets_T
        # The others would have the same places in the ring.
        is_kept_T = (offsets_T >= lengths_S[segment_T] - ring) & (kept_S[segment_T] >= 0)
        ring_T = torch.where(is_kept_T, slots_S[segment_T] * ring + positions_T % ring, zero + 1)
        before_C = torch.arange(-room, 0, device=device)
        positions_SC = begins_S[:, None] + before_C
        is_there_SC = positions_SC >= (applied_S - self.num_before).clamp(min=0)[:, None]
        carried_SC = torch.where(is_there_SC, slots_S[:, None] * ring + positions_SC % ring, zero)
        new_T, run_S = own_S[segment_T] + offsets_T, own_S - self.num_before
        numbers_5S = torch.stack(
            (
                slots_S,
                applied_S == 0,
                run_S + applied_S - begins_S,
                run_S + lengths_S,
                torch.where(kept_S >= 0, run_S + kept_S - begins_S, NOT_KEPT),
            )
        )
        before_N = (own_S[:, None] + before_C).flatten()
        return Line(carried_SC.flatten(), before_N, new_T, ring_T, new_T - self.num_before), numbers_5S

    def _runs(self, numbers_5S: np.ndarray) -> list[Runs]:
        """Segments that run together: all of them by a kernel, or those of similar lengths."""
        lengths_S = numbers_5S[3] - numbers_5S[2]
        groups_S = np.ceil(np.log2(np.maximum(lengths_S, 1))) * (not self.has_kernels)
        # Padding of static passes has no tokens, or no state.
        is_used_S = (lengths_S > 0) & (numbers_5S[4] >= 0)
        found = []
        for group in np.unique(groups_S[is_used_S]):
            own_5S = np.ascontiguousarray(numbers_5S[:, is_used_S & (groups_S == group)])
            padded = None if self.has_kernels else padded_of(own_5S, self._device)
            found.append(Runs(torch.from_numpy(own_5S).to(self._device), padded))
        return found


class StatePass:
    """One pass of a model with recurrent layers, and perhaps others that attend."""

    def __init__(self, attention: LayerAttention, states: RecurrentStates, places: Places) -> None:
        self.attend, self.rotate = attention.attend, partial(rotated_by, attention)
        self._states, self._places = states, places

    def mix(self, mixer: Mixer, rows_TR: Tensor) -> Tensor:
        states, layer, line = self._states, mixer.layer, self._places.line
        ring, held = states.rows[layer], states.states.get(layer, rows_TR)
        rows_LR = rows_TR.new_empty(len(rows_TR) + len(line.before_B), rows_TR.shape[1])
        rows_LR.index_copy_(0, line.before_B, ring.index_select(0, line.ring_B))
        rows_LR.index_copy_(0, line.new_T, rows_TR)
        num_unread = states.num_before - mixer.shape.num_before
        mixed_NO = mixer.scan(rows_LR[num_unread:], held, self._places.runs)
        ring.index_copy_(0, line.ring_T, rows_TR)
        return mixed_NO.index_select(0, line.outputs_T)
