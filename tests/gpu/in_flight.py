"""Copies between pinned memory and the device that the host has not waited for.

The device does its work at once here, so such a copy would always be over. Instead the worst is assumed that
the order of calls allows: a copy from the device arrives when the host has waited for it, and a copy to the
device reads its memory as late as that, so it must not have been overwritten by then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The bytes of memory in which a copy has not arrived yet: a NaN in every floating-point dtype.
NOT_ARRIVED = 0xFF


class _Copy(NamedTuple):
    number: int
    host: Tensor
    numbers: Tensor
    is_to_device: bool


class InFlight:
    """Copies in the order in which they were asked for."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._num_copies = 0

    def mark(self) -> int:
        """The argument of :meth:`reach` that stands for all copies until now."""
        return self._num_copies

    def send(self, host: Tensor) -> None:
        """The device will read this memory."""
        self._add(host, is_to_device=True)

    def fetch(self, host: Tensor) -> None:
        """A copy of this memory will arrive there."""
        self._add(host, is_to_device=False)
        host.copy_(
            torch.full(_bytes(host).shape, NOT_ARRIVED, dtype=torch.uint8).view(host.dtype).view(host.shape)
        )

    def reach(self, mark: int | None = None) -> None:
        """The host has waited for all copies until a mark, or for all of them."""
        reached = [copy for copy in self._copies if mark is None or copy.number <= mark]
        self._copies = self._copies[len(reached) :]
        for copy in reached:
            if not copy.is_to_device:
                copy.host.copy_(copy.numbers)
            elif not torch.equal(_bytes(copy.host), _bytes(copy.numbers)):
                raise RuntimeError(
                    "pinned memory was overwritten before its copy to the device had been waited for"
                )

    def _add(self, host: Tensor, *, is_to_device: bool) -> None:
        self._num_copies += 1
        self._copies.append(_Copy(self._num_copies, host, host.clone(), is_to_device))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
