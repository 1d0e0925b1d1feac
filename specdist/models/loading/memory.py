"""A device's total, free and peak memory."""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import dataclass

import torch

from specdist.utils import host
from specdist.utils.host import KIBIBYTE

# Of a host's memory, for passes and for other processes.
RESERVED_FRACTION = 0.15
MIB, GIB = 2**20, 2**30
# Recorded graphs after which the log says what they take.
FIRST_GRAPHS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A GPU's memory in bytes."""

    total_bytes: int
    free_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory after releasing what its allocator caches, which is gigabytes after loading."""
    release_memory(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes=total_bytes, free_bytes=free_bytes)


class GraphMemory:
    """What the models of one GPU may take for recorded graphs, beside tensors.

    CUDA says of no graph what it takes, so everything counts that is taken outside of torch's allocator from
    here on: kernels that are loaded at their first use, too.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._begin_bytes = self._taken_bytes()
        self._grown_bytes = self._largest_bytes = self._num_graphs = 0
        self._is_full = False

    def has_room(self) -> bool:
        """Whether another graph fits that is as large as the largest so far. To be called before each."""
        if self._is_full:
            return False
        grown_bytes = self._taken_bytes() - self._begin_bytes
        self._largest_bytes = max(self._largest_bytes, grown_bytes - self._grown_bytes)
        self._grown_bytes = grown_bytes
        if self._num_graphs == FIRST_GRAPHS:
            logger.info("CUDA graphs: %s", str(self))
        if grown_bytes + self._largest_bytes > self._most_bytes:
            self._is_full = True
            logger.warning(
                "no further passes are recorded as CUDA graphs, so that memory does not run out: %s. Other "
                "shapes run slower; a lower --cache_memory leaves more",
                str(self),
            )
            return False
        self._num_graphs += 1
        return True

    def __str__(self) -> str:
        return (
            f"{self._num_graphs} have taken {self._grown_bytes / GIB:.2f} of the "
            f"{self._most_bytes / GIB:.2f} GiB that they may take beside tensors, up to "
            f"{self._largest_bytes / MIB:.1f} MiB each"
        )

    def _taken_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)


def available_memory_bytes(num_sharers: int) -> int:
    """A host's memory that one rank's cache may take; the ranks there share it."""
    return int((1 - RESERVED_FRACTION) * host.available_memory_bytes() / num_sharers)


def release_memory(device: torch.device) -> None:
    """Release memory that the allocator caches, so that tensors of other sizes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: the allocator's on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE
