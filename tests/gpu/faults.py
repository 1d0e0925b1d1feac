"""Raises out-of-memory errors where a test wants them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Faults:
    """Counts what takes memory, and raises once when the planned moment has come."""

    def __init__(self) -> None:
        self.plan()

    def plan(self, *, allocation: int | None = None, capture: int | None = None, within: str = "") -> None:
        """See :meth:`tests.gpu.tensor.FakeDevice.fail_at`."""
        if allocation is not None and capture is not None:
            raise ValueError("allocation and capture: give one of them")
        self._num_allocations_left = allocation
        self._num_captures_left = capture
        self._within = within

    def begin_capture(self) -> None:
        if self._num_captures_left is not None:
            self._num_captures_left -= 1

    def allocate(self, line: Callable[[], str], *, is_capturing: bool) -> None:
        """An operator called by this line of the project takes memory."""
        if is_capturing:
            if self._num_captures_left == 0 and line().startswith(self._within):
                self._fail()
        elif self._num_allocations_left is not None and line().startswith(self._within):
            self._num_allocations_left -= 1
            if self._num_allocations_left == 0:
                self._fail()

    def _fail(self) -> None:
        self.plan()
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB "
            "of which 1.12 GiB is free."
        )
