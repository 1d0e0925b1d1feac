"""Messages between ranks: the words of a message in one frame over a preallocated buffer.

A frame has a fixed size, which the receiver knows; the rest of a longer message follows in a second transfer,
whose size the frame contains. A round's message fits into one frame unless prompts are long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.engine.messages.links import LinkFrom, LinkTo, Wait

# Of eight bytes.
FRAME_WORDS = 2048


class Wire:
    """One direction of messages. ``transfer`` sends or receives a whole tensor, blocking.

    ``num_messages`` and ``num_bytes`` count the transfers.
    """

    def __init__(self, transfer: Callable[[Tensor], object]) -> None:
        self._move = transfer
        self.num_messages = 0
        self.num_bytes = 0
        self._frame = torch.zeros(FRAME_WORDS, dtype=torch.int64)
        self._frame_words = self._frame.numpy()

    def transfer(self, tensor: Tensor) -> None:
        """Send a tensor, or receive into it; both ends know its shape."""
        self._move(tensor)
        self.num_messages += 1
        self.num_bytes += tensor.nbytes

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send arrays of integers: their number, their lengths, then their contents."""
        lengths = list(map(len, arrays))
        size = 1 + len(arrays) + sum(lengths)
        parts = [np.array([len(arrays), *lengths], np.int64), *arrays]
        if size <= FRAME_WORDS:
            np.concatenate(parts, out=self._frame_words[:size])
            self.transfer(self._frame)
            return
        message = np.concatenate(parts, dtype=np.int64)
        self._frame_words[:] = message[:FRAME_WORDS]
        self.transfer(self._frame)
        self.transfer(torch.from_numpy(message[FRAME_WORDS:]))

    def receive(self) -> list[np.ndarray]:
        """Wait for a message and return its arrays."""
        self.transfer(self._frame)
        num_arrays = int(self._frame_words[0])
        lengths = self._frame_words[1 : 1 + num_arrays].tolist()
        bounds = list(accumulate(lengths, initial=1 + num_arrays))
        size = bounds[-1]
        message = self._frame_words[:size].copy()
        if size > FRAME_WORDS:
            rest = torch.zeros(size - FRAME_WORDS, dtype=torch.int64)
            self.transfer(rest)
            message = np.concatenate([message, rest.numpy()])
        return [message[begin:end] for begin, end in pairwise(bounds)]


def wire_to(rank: int) -> Wire:
    """Messages to one rank of the world."""
    return Wire(LinkTo(rank))


def wire_from(rank: int, wait: Wait | None = None) -> Wire:
    """Messages from one rank of the world; see :class:`specdist.engine.messages.links.LinkFrom`."""
    return Wire(LinkFrom(rank, wait))


def wire_broadcast(source: int, group: dist.ProcessGroup) -> Wire:
    """Messages from the source to every other rank of the group; each end uses its own half."""
    return Wire(lambda tensor: dist.broadcast(tensor, source, group=group))
