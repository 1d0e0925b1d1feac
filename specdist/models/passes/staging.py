"""Sends a pass's inputs to the device with one copy, packed into one host buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# While one buffer is being copied, the next pass fills another; the host may be many draft steps ahead of the
# device, so more buffers are made when all are in flight, up to a bound.
NUM_HOST_BUFFERS = 3
MAX_HOST_BUFFERS = 32


class Event(Protocol):
    """The part of :class:`torch.cuda.Event` that is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class NothingInFlight:
    """The events of a host, where a copy is complete when its call returns."""

    def record(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""


class InputStaging:
    """A ring of pinned host buffers for one int32 buffer on the device.

    A buffer is reused only after its last copy is complete, since the device reads from it until then.
    """

    def __init__(self, size: int, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        is_cuda = device.type == "cuda"
        self._is_pinned = is_cuda
        self._new_event = new_event or (torch.cuda.Event if is_cuda else NothingInFlight)
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._ring = [self._new_host_buffer() for _ in range(NUM_HOST_BUFFERS)]
        self._next = 0

    def _new_host_buffer(self) -> tuple[Tensor, Event]:
        size = len(self.buffer)
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._is_pinned), self._new_event()

    def host(self) -> np.ndarray:
        """The host buffer to fill for the next :meth:`send`, int32 [size]."""
        tensor, arrived = self._ring[self._next]
        if not arrived.query():
            if len(self._ring) < MAX_HOST_BUFFERS:
                self._ring.insert(self._next, self._new_host_buffer())
                tensor, _ = self._ring[self._next]
            else:
                arrived.synchronize()
        return tensor.numpy()

    def send(self, length: int) -> Tensor:
        """Copy the first ``length`` numbers of the host buffer to the device's, which is returned."""
        tensor, arrived = self._ring[self._next]
        self.buffer[:length].copy_(tensor[:length], non_blocking=True)
        arrived.record()
        self._next = (self._next + 1) % len(self._ring)
        return self.buffer
