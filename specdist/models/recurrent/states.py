"""What recurrent layers keep of each sequence, in the place of keys and values, with exact rollback.

A state is a sum over all tokens so far, and no token can be taken out of it again. So a slot keeps the state
after all tokens but the last few, which may still be rolled back, and of these what the layer needs to run
them: their *rows*, a few kilobytes each, where a copy of the state would take megabytes. A pass runs the rows
that are still valid once more, then its own tokens, and leaves the state after those that no later pass can
take back (:class:`specdist.models.recurrent.rollback.Rollback`).

Positions alone decide. A pass whose tokens begin at a position keeps the rows before it and drops those after
it; a sequence's first token begins without a state. So engine and draft need to say nothing of acceptance:
as with pages, what has been rolled back is overwritten.

T flat tokens, S segments, L places of a segment, R numbers of a row, B branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.key_value import untouched_zeros
from specdist.models.passes.flat import FlatBatch, Segments
from specdist.models.recurrent.rollback import Rollback

STATE_DTYPE = torch.float32


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


@dataclass(frozen=True)
class Places:
    """Of segments that run together: each has ``num_before`` places that only a convolution reads, then
    ``num_carried`` with rows of earlier passes, the last at the end, then ``num_new``.

    Attributes:
        is_live_SL: of carried and new places, those that have a token; the others must change nothing.
        borders: after so many of them the state is kept, on the host; ``borders_S``: on the device.
    """

    num_before: int
    num_carried: int
    num_new: int
    is_live_SL: Tensor
    borders: np.ndarray
    borders_S: Tensor


class SlotStates(NamedTuple):
    """Of one layer, where the segments of a pass have their states: ``held`` are those of all slots, float32
    [slots, ...]; a sequence's first token has none before it, whatever its slot holds."""

    held: Tensor
    slots_S: Tensor
    is_first_S: Tensor

    def read(self) -> Tensor:
        """Before the pass, [S, ...]."""
        found = self.held.index_select(0, self.slots_S)
        return found.masked_fill_(self.is_first_S.view(-1, *[1] * (found.dim() - 1)), 0.0)

    def keep(self, after: Tensor) -> None:
        self.held.index_copy_(0, self.slots_S, after)


@dataclass(frozen=True)
class _Group:
    """Segments of similar lengths. ``carried_SL``: places in the rings; ``new_SQ``: flat tokens;
    ``outputs``: places in the group's (segment, new) order, and the flat tokens that they are of."""

    places: Places
    slots_S: Tensor
    is_first_S: Tensor
    carried_SL: Tensor
    has_carried_SL: Tensor
    new_SQ: Tensor
    has_new_SQ: Tensor
    outputs: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StatePlan:
    """Of a pass; ``kept``: flat tokens whose rows are kept, and their places in the rings."""

    groups: list[_Group]
    kept: tuple[Tensor, Tensor]


class RecurrentStates:
    """The memory of all slots, and which tokens each one's state and rows are of."""

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        *,
        num_slots: int,
        rollback: Rollback,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rollback, self._device = rollback, device
        self.num_before = max(shape.num_before for shape in shapes.values())
        self._ring = rollback.num_tokens + self.num_before
        self.rows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        for layer, shape in shapes.items():
            self.rows[layer] = untouched_zeros((num_slots, self._ring, shape.row_width), dtype, device)
            if shape.state:
                self.states[layer] = untouched_zeros((num_slots, *shape.state), STATE_DTYPE, device)
        # The state is after so many tokens, and the rows reach up to these.
        self._applied, self._ends = np.zeros((2, num_slots), np.int64)

    def assume(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """For passes that are only timed: as if each slot had a state of so many tokens."""
        self._applied[slots] = self._ends[slots] = lengths

    def copy(self, sources_B: np.ndarray, targets_B: np.ndarray) -> None:
        """Let slots have the states of others; no target is a source."""
        self._applied[targets_B], self._ends[targets_B] = self._applied[sources_B], self._ends[sources_B]
        sources, targets = (torch.from_numpy(slots).to(self._device) for slots in (sources_B, targets_B))
        for held in (*self.rows.values(), *self.states.values()):
            held.index_copy_(0, targets, held.index_select(0, sources))

    def plan(self, batch: FlatBatch) -> StatePlan:
        """Of a pass over these tokens; to be run before the next one is planned.

        Raises RuntimeError for tokens that a slot's state does not lead to.
        """
        segments = Segments.of(batch)
        starts_S, lengths_S = segments.starts_S, segments.lengths_S
        slots_S, begins_S = batch.slots_T[starts_S], batch.positions_T[starts_S]
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
        buckets_S = np.ceil(np.log2(lengths_S)).astype(np.int64)
        groups = []
        for bucket in np.unique(buckets_S):
            members = np.flatnonzero(buckets_S == bucket)
            columns = (slots_S, starts_S, begins_S, lengths_S, applied_S, kept_S)
            groups.append(self._group(*(column_S[members] for column_S in columns)))
        # The others would have the same places.
        is_kept_T = batch.positions_T >= np.repeat(ends_S - self._ring, lengths_S)
        kept_T = np.flatnonzero(is_kept_T)
        return StatePlan(groups, (self._on_device(kept_T), self._on_device(self._places(batch, kept_T))))

    def _places(self, batch: FlatBatch, tokens: np.ndarray) -> np.ndarray:
        found: np.ndarray = batch.slots_T[tokens] * self._ring + batch.positions_T[tokens] % self._ring
        return found

    def _group(
        self,
        slots_S: np.ndarray,
        starts_S: np.ndarray,
        begins_S: np.ndarray,
        lengths_S: np.ndarray,
        applied_S: np.ndarray,
        kept_S: np.ndarray,
    ) -> _Group:
        num_carried, num_new = int((begins_S - applied_S).max()), int(lengths_S.max())
        num_read = self.num_before + num_carried
        positions_SL = begins_S[:, None] - num_read + np.arange(num_read)
        has_carried_SL = positions_SL >= np.maximum(applied_S - self.num_before, 0)[:, None]
        carried_SL = np.where(has_carried_SL, slots_S[:, None] * self._ring + positions_SL % self._ring, 0)
        offsets_Q = np.arange(num_new)
        has_new_SQ = offsets_Q < lengths_S[:, None]
        new_SQ = starts_S[:, None] + np.minimum(offsets_Q, lengths_S[:, None] - 1)
        is_live_SL = np.concatenate(
            [(positions_SL >= applied_S[:, None])[:, self.num_before :], has_new_SQ], axis=1
        )
        borders = num_carried + kept_S - begins_S
        real = np.flatnonzero(has_new_SQ)
        on_device = self._on_device
        places = Places(
            self.num_before, num_carried, num_new, on_device(is_live_SL), borders, on_device(borders)
        )
        return _Group(
            places=places,
            slots_S=on_device(slots_S.astype(np.int64)),
            is_first_S=on_device(begins_S == 0),
            carried_SL=on_device(carried_SL),
            has_carried_SL=on_device(has_carried_SL),
            new_SQ=on_device(new_SQ),
            has_new_SQ=on_device(has_new_SQ),
            outputs=(on_device(real), on_device(new_SQ.ravel()[real])),
        )

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
