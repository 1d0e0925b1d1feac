"""Hidden states of the target, as a part of a request to a draft that reads them.

With a request travel the states of all tokens that the last pass has run and that are committed: of each
block the next token and the accepted candidates, and all of the contexts.

R sequences that decode, M stretches of tokens, T tokens of the last pass, C of them that are committed, S
numbers of a token's states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdist.models.batch.flat import FlatBatch, Segments
from specdist.models.passes.hidden import StateReader
from specdist.sampling.uploads import upload
from specdist.utils.ranges import arange_segments, places_from


@dataclass(frozen=True)
class TargetStates:
    """The target's states of committed tokens.

    Attributes:
        slots_M, begins_M, lengths_M: stretches of consecutive positions, at least one.
    """

    slots_M: np.ndarray
    begins_M: np.ndarray
    lengths_M: np.ndarray
    states_CS: Tensor

    @property
    def places_C(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions."""
        return places_from(self.slots_M, self.begins_M, self.lengths_M)

    @property
    def header(self) -> tuple[Any, ...]:
        """All but the states, of which the size and the type."""
        shape, dtype = tuple(self.states_CS.shape), self.states_CS.dtype
        return self.slots_M, self.begins_M, self.lengths_M, shape, dtype

    @staticmethod
    def of_header(header: tuple[Any, ...], device: torch.device) -> TargetStates:
        """Make the message, with states to be received."""
        slots_M, begins_M, lengths_M, shape, dtype = header
        return TargetStates(slots_M, begins_M, lengths_M, torch.empty(shape, dtype=dtype, device=device))


class LastStates:
    """The states that the target's last pass has left, one request after the other."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self._num_context = 0
        reader.last = None  # passes that measured times

    def taken(
        self, slots_R: np.ndarray, num_accepted_R: np.ndarray, num_prefill_tokens: int
    ) -> TargetStates | None:
        """What a request brings; None if the last pass has left nothing.

        ``num_prefill_tokens``: context tokens of the next pass.
        """
        num_context, self._num_context = self._num_context, num_prefill_tokens
        found, self._reader.last = self._reader.last, None
        if found is None:
            return None
        batch, states_TS = found
        slots_M, begins_M, starts_M, lengths_M = _committed(batch, num_context, slots_R, num_accepted_R)
        if not len(slots_M):
            return None
        (index_C,) = upload(states_TS.device, np.repeat(starts_M, lengths_M) + arange_segments(lengths_M))
        return TargetStates(slots_M, begins_M, lengths_M, states_TS[index_C])


def _committed(
    batch: FlatBatch, num_context: int, slots_R: np.ndarray, num_accepted_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What each slot has in the pass, whose last ``num_context`` tokens are of contexts: the slot, the first
    position, its index in the pass, and how many are committed; only of those that have any."""
    segments = Segments.of(batch)
    slots_M = batch.slots_T[segments.starts_S]
    num_accepted = np.full(max(slots_M.max(initial=0), slots_R.max(initial=0)) + 1, -1)
    # Of a block whose sequence has ended, or waits, nothing is needed.
    num_accepted[slots_R] = num_accepted_R
    is_context_M = segments.starts_S >= len(batch) - num_context
    lengths_M = np.where(is_context_M, segments.lengths_S, num_accepted[slots_M] + 1)
    kept = lengths_M > 0
    begins_M = batch.positions_T[segments.starts_S]
    return slots_M[kept], begins_M[kept], segments.starts_S[kept], lengths_M[kept]
