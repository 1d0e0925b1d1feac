"""How much memory a device has left, and how much was used at most."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

# What the passes themselves need beside weights and cache: activations, logits, the sorts of top-p.
RESERVED_FRACTION = 0.15
KIBIBYTE = 1024


def available_memory_bytes(device: torch.device, num_sharers: int) -> int:
    """Memory that the cache may take; a host's is shared with the other ranks on it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - RESERVED_FRACTION * total)
    return int((1 - RESERVED_FRACTION) * psutil.virtual_memory().available / num_sharers)


def release_memory(device: torch.device) -> None:
    """What the allocator keeps for later, a larger or smaller tensor may need."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: the allocator's on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE
