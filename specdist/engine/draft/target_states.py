"""Hidden states of the target, as a part of a request to a draft that reads them (EAGLE-3).

M stretches of tokens, C tokens of them, S numbers of a token's states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdist.engine.messages.packing import not_sent
from specdist.utils.ranges import places_from

# By number in a message.
STATE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """Those of committed tokens.

    Attributes:
        slots_M, begins_M, lengths_M: stretches of consecutive positions, at least one.
        width, dtype: S, and the index of their type in ``STATE_TYPES``.
        states_CS: sent after the request.
    """

    slots_M: np.ndarray
    begins_M: np.ndarray
    lengths_M: np.ndarray
    width: int
    dtype: int
    states_CS: Tensor = not_sent()

    @property
    def places_C(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and positions."""
        return places_from(self.slots_M, self.begins_M, self.lengths_M)

    def send(self, transfer: Callable[[Tensor], object]) -> None:
        transfer(self.states_CS.contiguous().view(torch.uint8))

    def received(self, transfer: Callable[[Tensor], object], device: torch.device) -> TargetStates:
        """With the states that were sent after the request."""
        shape = int(self.lengths_M.sum()), self.width
        states_CS = torch.empty(shape, dtype=STATE_TYPES[self.dtype], device=device)
        transfer(states_CS.view(torch.uint8))
        return dataclasses.replace(self, states_CS=states_CS)
