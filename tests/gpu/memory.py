"""The memory of the fake device: what is held now, and the most that was held at a time."""

from __future__ import annotations

import torch

GIB = 2**30


class DeviceMemory:
    """Bytes on one device of one process.

    Torch's allocator keeps what it once had for other tensors until it is told to release it. A recorded pass
    has the memory of its tensors for good, and all of one pool share it; beside the allocator it has that of
    its kernels, ``of_graphs``.

    Attributes:
        held: of tensors that are referred to.
        reserved: held by the allocator, with what it keeps, and without pools.
        peak, peak_taken: the most of ``held`` and pools, and of all together; ``others`` not counted.
        kernel: taken for every kernel of a graph.
    """

    def __init__(self) -> None:
        self.total = 80 * GIB
        self.others = 10 * GIB
        self.held = self.reserved = self.peak = self.peak_taken = 0
        self.kernel = self.of_graphs = 0
        self.pools: dict[object, int] = {}
        self._before_capture: int | None = None
        self._peak_of_capture = 0

    @property
    def allocated(self) -> int:
        """By torch's allocator, for tensors and pools."""
        return self.reserved + sum(self.pools.values())

    @property
    def taken(self) -> int:
        return self.allocated + self.of_graphs

    @property
    def free(self) -> int:
        return self.total - self.others - self.taken

    def hold(self, num_bytes: int) -> None:
        """Of a new tensor. Raises ``torch.OutOfMemoryError`` if it does not fit."""
        self.held += num_bytes
        try:
            self._count()
        except torch.OutOfMemoryError:
            self.release(num_bytes)
            self.empty_cache()
            raise

    def _count(self) -> None:
        if self._before_capture is not None:
            self._peak_of_capture = max(self._peak_of_capture, self.held - self._before_capture)
            return
        self.reserved = max(self.reserved, self.held)
        self._look()

    def release(self, num_bytes: int) -> None:
        """No tensor refers to it any more."""
        self.held -= num_bytes

    def empty_cache(self) -> None:
        self.reserved = self.held

    def begin_capture(self) -> None:
        self._before_capture, self._peak_of_capture = self.held, 0

    def end_capture(self, pool: object, num_kernels: int) -> None:
        """Of tensors that the capture has allocated nothing is held: they are in the pool."""
        self._before_capture = None
        self.pools[pool] = max(self.pools.get(pool, 0), self._peak_of_capture)
        self.of_graphs += num_kernels * self.kernel
        self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, self.held + sum(self.pools.values()))
        if self.free < 0:
            self.empty_cache()
        if self.free < 0:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {-self.free} bytes more than there are")
        self.peak_taken = max(self.peak_taken, self.taken)
