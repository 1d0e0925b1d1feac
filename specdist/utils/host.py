"""What Linux says in ``/proc`` of processes, and of the host's memory."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

KIBIBYTE = 1024
MIB, GIB = 2**20, 2**30
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def available_memory_bytes() -> int:
    """What programs can still take without swapping; all that there is where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = dict(line.split(":", 1) for line in lines)["MemAvailable"]
    return int(available.split()[0]) * KIBIBYTE


def process_state(pid: int) -> tuple[str, int] | None:
    """A process's state, a letter of ``man 5 proc``, and its start in clock ticks after the machine's; None
    if there is none, or the system does not tell."""
    try:
        # The second field is the name in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@cache
def process_start_s() -> float:
    """When this process began, or the one that asked before a fork, in Unix time; now, if it is not known."""
    found = process_state(os.getpid())
    if found is None:
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - found[1] / TICKS_PER_S)
