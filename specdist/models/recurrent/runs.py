"""The segments of a pass that recurrent layers run together, and what a layer keeps of a sequence.

N places that are run, S segments, P places of the longest of some segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.prefix_states import Rollback

STATE_DTYPE = torch.float32


class StateShape(NamedTuple):
    """What a layer keeps: the numbers of a token's row, the tokens before it whose rows are needed with it
    (of a convolution one less than its width), and the state's shape, empty without one."""

    row_width: int
    num_before: int
    state: tuple[int, ...] = ()

    @property
    def num_numbers(self) -> int:
        """Numbers of the state."""
        return math.prod(self.state) if self.state else 0

    def num_bytes(self, rollback: Rollback, number_bytes: int) -> int:
        """Bytes of a slot."""
        rows = (rollback.num_tokens + self.num_before) * self.row_width * number_bytes
        return rows + self.num_numbers * STATE_DTYPE.itemsize


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
    """

    numbers_5S: Tensor
    padded: Padded | None = None

    def read(self, held: Tensor) -> Tensor:
        """The states before the pass [S, ...], of one layer's states of all slots, float32 [slots, ...]."""
        found = held.index_select(0, self.numbers_5S[0])
        return found.masked_fill_(self.numbers_5S[1].bool().view(-1, *[1] * (found.dim() - 1)), 0.0)

    def keep(self, held: Tensor, after: Tensor) -> None:
        held.index_copy_(0, self.numbers_5S[0], after)


def recur(
    output: Tensor,
    held: Tensor,
    runs: Sequence[Runs],
    kernel: Callable[[Tensor], None] | None,
    plain: Callable[[Tensor, Padded], tuple[Tensor, Tensor]],
) -> Tensor:
    """Write the outputs [N, ...] of all runs, zeros at first, and leave each slot's state as they say.

    Args:
        held: of one layer, float32 [slots, ...].
        kernel: of the numbers of runs, writes outputs and states.
        plain: of the states before padded runs, [S, ...], to outputs [S, P, ...] and the states at their
            borders.
    """
    for own in runs:
        if own.padded is None:
            assert kernel is not None
            kernel(own.numbers_5S)
            continue
        found, after = plain(own.read(held), own.padded)
        own.keep(held, after)
        sources, targets = own.padded.outputs
        output.index_copy_(0, targets, found.flatten(0, 1)[sources])
    return output


def padded_of(numbers_5S: np.ndarray, device: torch.device) -> Padded:
    """The padded places of :class:`Runs` whose numbers are on the host."""
    firsts_S, lengths_S = numbers_5S[2], numbers_5S[3] - numbers_5S[2]
    offsets_P = np.arange(lengths_S.max())
    places_SP = firsts_S[:, None] + np.minimum(offsets_P, lengths_S[:, None] - 1)
    borders, wanted_N = numbers_5S[4] - firsts_S, np.flatnonzero(offsets_P < lengths_S[:, None])
    places, borders_S, *outputs = (
        torch.from_numpy(each).to(device)
        for each in (places_SP, borders, wanted_N, places_SP.ravel()[wanted_N])
    )
    return Padded(places, borders, borders_S, (outputs[0], outputs[1]))
