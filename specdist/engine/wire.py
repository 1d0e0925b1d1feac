"""Messages between ranks: the integers of a message in one frame over a preallocated buffer.

A frame has a fixed size, which the receiver knows; the rest of a longer message follows in a second transfer,
whose size the frame contains. A round's message fits into one frame unless prompts are long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.engine.links import LinkFrom, LinkTo, Wait

FRAME_INTS = 4096


class Wire:
    """One direction of messages. ``transfer`` sends or receives a whole tensor, blocking.

    ``num_messages`` and ``num_bytes`` count the transfers.
    """

    def __init__(self, transfer: Callable[[Tensor], object]) -> None:
        self._move = transfer
        self.num_messages = 0
        self.num_bytes = 0
        self._frame = torch.zeros(FRAME_INTS, dtype=torch.int32)

    def transfer(self, tensor: Tensor) -> None:
        """Send a tensor, or receive into it; both ends know its shape."""
        self._move(tensor)
        self.num_messages += 1
        self.num_bytes += tensor.nbytes

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send int32 arrays: their number, their lengths, then their contents."""
        parts = [np.array([len(arrays), *map(len, arrays)], np.int32)]
        parts += [array.astype(np.int32, copy=False) for array in arrays]
        message = np.concatenate(parts)
        first = message[:FRAME_INTS]
        self._frame.numpy()[: len(first)] = first
        self.transfer(self._frame)
        if len(message) > FRAME_INTS:
            self.transfer(torch.from_numpy(message[FRAME_INTS:]))

    def receive(self) -> list[np.ndarray]:
        """Wait for a message and return its arrays."""
        self.transfer(self._frame)
        num_arrays = int(self._frame[0])
        lengths = self._frame[1 : 1 + num_arrays].tolist()
        missing = 1 + num_arrays + sum(lengths) - FRAME_INTS
        message = self._frame.numpy()
        if missing > 0:
            rest = torch.zeros(missing, dtype=torch.int32)
            self.transfer(rest)
            message = np.concatenate([message, rest.numpy()])
        bounds = 1 + num_arrays + np.cumsum([0, *lengths])
        return [message[begin:end].copy() for begin, end in pairwise(bounds.tolist())]


def wire_to(rank: int) -> Wire:
    """Messages to one rank of the world."""
    return Wire(LinkTo(rank))


def wire_from(rank: int, wait: Wait | None = None) -> Wire:
    """Messages from one rank of the world; see :class:`specdist.engine.links.LinkFrom`."""
    return Wire(LinkFrom(rank, wait))


def wire_broadcast(source: int, group: dist.ProcessGroup) -> Wire:
    """Messages from the source to every other rank of the group; each end uses its own half."""
    return Wire(lambda tensor: dist.broadcast(tensor, source, group=group))
