"""Each rank on the CPUs next to its GPU, so that what it copies to the device comes from memory next to it.

Memory follows the CPUs, since Linux takes a page from the node of the CPU that first writes to it. So a
process is to be bound before it allocates: before CUDA starts, and before its weights are read.
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
# A driver that does not answer must not keep the job from starting.
QUERY_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """As ``nvidia-smi`` names it. ``bus_id``: such as ``00000000:07:00.0``."""

    index: str
    uuid: str
    bus_id: str


def bind_near_gpu(
    local_rank: int, *, environment: Mapping[str, str] = os.environ, system: Path = SYSTEM
) -> None:
    """Bind this process, with all its threads, to the CPUs of its GPU's NUMA node, as far as it may use them.

    A mask that Slurm has set is narrowed, never widened. Where anything is unknown, all stays as it is.
    """
    bus_id = _bus_id(_visible_name(local_rank, environment))
    near = None if bus_id is None else _cpus_near(bus_id, system)
    if near is None:
        logger.info("the CPUs next to GPU %d are not known: the rank is not bound to any", local_rank)
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
    """What ``CUDA_VISIBLE_DEVICES`` calls the rank's GPU: its number, or the UUID of it or of a MIG slice."""
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
    # CUDA takes the beginning of a UUID, too.
    found = [
        gpu for gpu in gpus if name == gpu.index or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    ]
    return found[0].bus_id if len(found) == 1 else None


def _gpu_of_slice(name: str) -> str | None:
    """The UUID of the GPU that a MIG slice is part of."""
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
    """Lines of nvidia-smi's answer; none where there is no nvidia-smi."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S
        ).stdout.splitlines()
    return []


def _cpus_near(bus_id: str, system: Path) -> set[int] | None:
    """None where the system does not say, as on machines of one node (-1)."""
    domain, _, rest = bus_id.lower().partition(":")
    device = f"{domain[-4:]}:{rest}"
    with contextlib.suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / device / "numa_node").read_text())
        if node >= 0:
            return _parsed((system / f"devices/system/node/node{node}/cpulist").read_text()) or None
    return None


def _parsed(cpus: str) -> set[int]:
    """Of ``0-3,8``."""
    found: set[int] = set()
    for part in cpus.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
