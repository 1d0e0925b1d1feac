"""Binds each rank to the CPUs next to its GPU, so that copies to the device come from memory next to it.

Linux takes a page of memory from the NUMA node of the CPU that first writes to it. So a process must be bound
before it allocates memory: before CUDA starts, and before weights are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys")
# A driver that does not respond must not keep the job from starting.
QUERY_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU as ``nvidia-smi`` names it. ``bus_id``: such as ``00000000:07:00.0``."""

    index: str
    uuid: str
    bus_id: str


def bind_near_gpu(
    local_rank: int, *, environment: Mapping[str, str] = os.environ, system: Path = SYSTEM
) -> None:
    """Bind this process and all its threads to those of its CPUs that are on its GPU's NUMA node.

    The set of allowed CPUs, as Slurm sets it, only gets smaller. If anything is unknown, nothing is changed.
    """
    bus_id = _bus_id(_visible_name(local_rank, environment))
    near = None if bus_id is None else _cpus_near(bus_id, system)
    if near is None:
        logger.info("the CPUs next to GPU %d are unknown: the rank is not bound to CPUs", local_rank)
        return
    allowed = os.sched_getaffinity(0)
    if not near & allowed:
        logger.warning(
            "the CPUs next to GPU %s are %s, but this rank may only use %s: ask the scheduler for those, or "
            "for whole nodes",
            bus_id,
            ranges(near),
            ranges(allowed),
        )
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread.name), near & allowed)
    logger.info("bound to CPUs %s, next to GPU %s", ranges(near & allowed), bus_id)


def ranges(cpus: set[int]) -> str:
    """``0-3,8``, as the kernel writes them."""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _visible_name(local_rank: int, environment: Mapping[str, str]) -> str | None:
    """The rank's GPU in ``CUDA_VISIBLE_DEVICES``: its index, its UUID, or the UUID of a MIG instance."""
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return str(local_rank)
    listed = [name.strip() for name in names.split(",")]
    return listed[local_rank] if local_rank < len(listed) else None


def _bus_id(name: str | None) -> str | None:
    if not name:
        return None
    lines = _ask("--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
    gpus = [Gpu(*map(str.strip, line.split(","))) for line in lines if line.count(",") == 2]
    if name.startswith("MIG-"):
        name = _gpu_of_slice(name) or name
    # CUDA also takes the beginning of a UUID.
    found = [
        gpu for gpu in gpus if name == gpu.index or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    ]
    return found[0].bus_id if len(found) == 1 else None


def _gpu_of_slice(name: str) -> str | None:
    """The UUID of the GPU of a MIG instance."""
    uuid: str | None = None
    for line in _ask("-L"):
        if (found := re.search(r"UUID: ([^)\s]+)", line)) is None:
            continue
        if found[1].startswith("GPU-"):
            uuid = found[1]
        elif found[1].startswith(name):
            return uuid
    return None


def _ask(*arguments: str) -> list[str]:
    """Output lines of nvidia-smi; none if it fails or does not exist."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        answer = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=QUERY_TIMEOUT_S
        )
        return answer.splitlines()
    return []


def _cpus_near(bus_id: str, system: Path) -> set[int] | None:
    """The CPUs of the device's NUMA node; None if unknown, as on machines with one node (-1)."""
    domain, _, rest = bus_id.lower().partition(":")
    device = f"{domain[-4:]}:{rest}"
    with contextlib.suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / device / "numa_node").read_text())
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
