"""A device's total, free and peak memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from specdist.utils import host
from specdist.utils.host import KIBIBYTE

# The share of a host's memory for passes and for other processes.
RESERVED_FRACTION = 0.15


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
