"""Binds each rank to the CPUs next to its GPU, so that copies to the device come from memory next to it.

Linux takes a page of memory from the NUMA node of the CPU that first writes to it. So a process must be bound
before it allocates memory: before it uses the GPU, and before weights are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")

logger = logging.getLogger(__name__)


def bind_near_gpu(local_rank: int, *, system: Path = SYSTEM) -> None:
    """Bind this process and all its threads to those of its CPUs that are on its GPU's NUMA node.

    The set of allowed CPUs, as Slurm sets it, only gets smaller. If anything is unknown, nothing is changed.
    """
    near = _cpus_near(local_rank, system)
    if near is None:
        logger.info("the CPUs next to GPU %d are unknown: the rank is not bound to CPUs", local_rank)
        return
    allowed = os.sched_getaffinity(0)
    if not near & allowed:
        logger.warning(
            "the CPUs next to GPU %d are %s, but this rank may only use %s: ask the scheduler for those, or "
            "for whole nodes",
            local_rank,
            ranges(near),
            ranges(allowed),
        )
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread.name), near & allowed)
    logger.info("bound to CPUs %s, next to GPU %d", ranges(near & allowed), local_rank)


def ranges(cpus: set[int]) -> str:
    """``0-3,8``, as the kernel writes them."""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _cpus_near(local_rank: int, system: Path) -> set[int] | None:
    """The CPUs of the GPU's NUMA node; None if unknown, as on machines with one node (-1)."""
    with contextlib.suppress(Exception):  # drivers raise errors of many kinds, and a rank needs no binding
        gpu: Any = torch.cuda.get_device_properties(local_rank)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        if node >= 0:
            return _parsed((system / f"devices/system/node/node{node}/cpulist").read_text()) or None
    return None


def _parsed(cpus: str) -> set[int]:
    """The set of ``0-3,8``."""
    found: set[int] = set()
    for part in cpus.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
