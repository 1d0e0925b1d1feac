"""What recurrent layers keep of each sequence, in the place of keys and values, with exact rollback.

A state is a sum over all tokens so far, and no token can be taken out of it again. So a slot keeps the state
after all tokens but the last few, which may still be rolled back, and of these what the layer needs to run
them: their *rows*, a few kilobytes each, where a copy of the state would take megabytes. A pass runs the rows
that are still valid once more, then its own tokens, and leaves the state after those that no later pass can
take back (:class:`specdist.models.recurrent.rollback.Rollback`).

Positions alone decide. A pass whose tokens begin at a position keeps the rows before it and drops those after
it; a sequence's first token begins without a state. So engine and draft need to say nothing of acceptance:
as with pages, what has been rolled back is overwritten.

A pass lays its rows out in one line of places: of each segment those that come before its own, as many of
every one, then its own. Where they are follows from a few numbers of each segment (:class:`Told`), on the
device, too, so that a recorded pass is right for whatever was accepted.

T flat tokens, S segments, L places with rows, N places that are run (all but the first few), C places of a
segment before its own, R numbers of a row, B branches, P places of the longest of some segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch, Segments
from specdist.models.cache.key_value import untouched_zeros
from specdist.models.cache.pages import PageUpdates
from specdist.models.recurrent.kernels import MAX_KERNEL_TOKENS, kernels_on
from specdist.models.recurrent.rollback import Rollback

STATE_DTYPE = torch.float32
NO_COPIES = np.zeros((3, 0), np.int64)


class StateShape(NamedTuple):
    """Of a layer: the numbers of a token's row, the tokens before it whose rows are needed with it (of a
    convolution one less than its width), and the state's shape, empty without one."""

    row_width: int
    num_before: int
    state: tuple[int, ...] = ()

    @property
    def num_numbers(self) -> int:
        """Of the state."""
        return math.prod(self.state) if self.state else 0

    def num_bytes(self, rollback: Rollback, number_bytes: int) -> int:
        """Of a slot."""
        rows = (rollback.num_tokens + self.num_before) * self.row_width * number_bytes
        return rows + self.num_numbers * STATE_DTYPE.itemsize


class Told(NamedTuple):
    """What a pass is told of its segments, integers on the host or on the device: the slots of their
    sequences, the positions of their first tokens, their numbers of tokens, and how many of the sequence's
    tokens the slot's state is after, before the pass and after it. With :data:`NOT_KEPT` the pass leaves the
    slot as it is."""

    slots_S: Any
    begins_S: Any
    lengths_S: Any
    applied_S: Any
    kept_S: Any


NUM_TOLD = len(Told._fields)
NOT_KEPT = -1


@dataclass(frozen=True)
class Padded:
    """Some segments beside one another, for plain operations.

    Attributes:
        places_SP: of each segment, from its first one on; then the last one again, which comes after all that
            is wanted.
        borders: the state is kept after so many of them, on the host; ``borders_S``: on the device.
        outputs: which of all S × P are wanted, and their places.
    """

    places_SP: Tensor
    borders: np.ndarray
    borders_S: Tensor
    outputs: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Runs:
    """Segments that run together.

    Attributes:
        numbers_5S: int64: the slot; 1 if it has no state yet, whatever it holds; the first place that is run
            and the one after the last; and the one before which the slot's state is kept, negative if it is
            not.
        padded: for plain operations; None where a kernel runs them.
        long_5S: the same numbers on the host, of so many tokens that a library is faster.
    """

    numbers_5S: Tensor
    padded: Padded | None = None
    long_5S: np.ndarray | None = None

    def read(self, held: Tensor) -> Tensor:
        """Of one layer's states of all slots, float32 [slots, ...], those before the pass: [S, ...]."""
        found = held.index_select(0, self.numbers_5S[0])
        return found.masked_fill_(self.numbers_5S[1].bool().view(-1, *[1] * (found.dim() - 1)), 0.0)

    def keep(self, held: Tensor, after: Tensor) -> None:
        held.index_copy_(0, self.numbers_5S[0], after)


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
    """Of a pass, on the device, with all segments."""

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
        """For passes that are only timed: as if each slot had a state of so many tokens."""
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

    def plan(self, slots_S: np.ndarray, begins_S: np.ndarray, lengths_S: np.ndarray) -> Told:
        """Of a pass over so many tokens of each slot, from these positions on; to be run before the next one
        is planned.

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
        return Told(slots_S, begins_S, lengths_S, applied_S, kept_S)

    def places(self, batch: FlatBatch) -> Places:
        """Of a pass over these tokens, as :meth:`plan`."""
        segments = Segments.of(batch)
        starts_S = segments.starts_S
        told = self.plan(batch.slots_T[starts_S], batch.positions_T[starts_S], segments.lengths_S)
        on_host = Told(*(torch.from_numpy(each.astype(np.int64)) for each in told))
        line, numbers_5S = self._laid_out(on_host, len(batch))
        return Places(Line(*(each.to(self._device) for each in line)), self._runs(numbers_5S.numpy()))

    def recorded_places(self, told_5S: Tensor, num_tokens: int) -> Places:
        """The same of what is on the device. No shape depends on it, and padding follows the last segment."""
        line, numbers_5S = self._laid_out(Told(*told_5S.long()), num_tokens)
        is_alone = self.has_kernels or not self.states
        runs = [Runs(numbers_5S)] if is_alone else self._runs(numbers_5S.numpy())
        return Places(line, runs)

    def _laid_out(self, told: Told, num_tokens: int) -> tuple[Line, Tensor]:
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
        """By a kernel or a library, or of similar lengths."""
        lengths_S = numbers_5S[3] - numbers_5S[2]
        if self.has_kernels:
            groups_S = lengths_S > MAX_KERNEL_TOKENS
        else:
            groups_S = np.ceil(np.log2(np.maximum(lengths_S, 1)))
        # Padding of static passes has no tokens, or no state.
        is_used_S = (lengths_S > 0) & (numbers_5S[4] >= 0)
        found = []
        for group in np.unique(groups_S[is_used_S]):
            own_5S = np.ascontiguousarray(numbers_5S[:, is_used_S & (groups_S == group)])
            found.append(
                Runs(
                    torch.from_numpy(own_5S).to(self._device),
                    None if self.has_kernels else padded_of(own_5S, self._device),
                    own_5S if self.has_kernels and group else None,
                )
            )
        return found


def recur(
    output: Tensor,
    held: Tensor,
    runs: Sequence[Runs],
    kernel: Callable[[Tensor], None] | None,
    plain: Callable[[Tensor, Padded], tuple[Tensor, Tensor]],
    library: Callable[[Tensor, slice], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Write the outputs [N, ...] of all runs, zeros at first, and leave each slot's state as they say.

    Args:
        held: of one layer, float32 [slots, ...].
        kernel: of the numbers of runs, writes outputs and states.
        plain: of the states before padded runs, [S, ...], to outputs [S, P, ...] and the states at their
            borders.
        library: of one state [1, ...] and a part of the line, to its outputs and the state after it.
    """
    for own in runs:
        if own.padded is None:
            assert kernel is not None
            if library is None or own.long_5S is None:
                kernel(own.numbers_5S)
            else:
                kernel(_by_library(output, held, own.long_5S, library))
            continue
        found, after = plain(own.read(held), own.padded)
        own.keep(held, after)
        sources, targets = own.padded.outputs
        output.index_copy_(0, targets, found.flatten(0, 1)[sources])
    return output


def _by_library(
    output: Tensor,
    held: Tensor,
    numbers_5S: np.ndarray,
    library: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
) -> Tensor:
    """Run each segment up to its border; returns what is left to run, which leaves the states as they are."""
    slots_S, is_first_S, firsts_S, ends_S, borders_S = numbers_5S
    for slot, is_first, first, border in zip(slots_S, is_first_S, firsts_S, borders_S, strict=True):
        if first < border:
            before = held[slot : slot + 1]
            found, after = library(torch.zeros_like(before) if is_first else before, slice(first, border))
            output[first:border], held[slot] = found, after[0]
    left_5S = np.stack((slots_S, is_first_S * (firsts_S == borders_S), borders_S, ends_S, borders_S))
    return torch.from_numpy(left_5S).to(held.device)


def padded_of(numbers_5S: np.ndarray, device: torch.device) -> Padded:
    """Of :class:`Runs` on the host."""
    firsts_S, lengths_S = numbers_5S[2], numbers_5S[3] - numbers_5S[2]
    offsets_P = np.arange(lengths_S.max())
    places_SP = firsts_S[:, None] + np.minimum(offsets_P, lengths_S[:, None] - 1)
    borders, wanted_N = numbers_5S[4] - firsts_S, np.flatnonzero(offsets_P < lengths_S[:, None])
    places, borders_S, *outputs = (
        torch.from_numpy(each).to(device)
        for each in (places_SP, borders, wanted_N, places_SP.ravel()[wanted_N])
    )
    return Padded(places, borders, borders_S, (outputs[0], outputs[1]))
