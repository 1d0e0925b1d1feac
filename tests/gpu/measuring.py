"""The main job on ranks with fake GPUs of little memory. Each says at the end what it has taken."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import specdist.job.replica.replica
from specdist.cli import generate
from specdist.job.costs.allocation import CacheRoom
from specdist.job.ranks.watchdog import Watchdog
from tests.gpu.device import DEVICE
from tests.gpu.generating import use_fake_device

MIB = 2**20
TAKEN = "memory that was taken: "


def measuring(given: Sequence[str]) -> int:
    use_fake_device()
    memory = DEVICE.memory
    memory.total, memory.others = 3800 * MIB, 512 * MIB
    memory.connection, memory.kernel = 150 * MIB, 4 * MIB
    size, leave = specdist.job.replica.replica.room_for_cache, Watchdog.leave
    found: dict[str, Any] = {}

    def noted(*args: Any, **options: Any) -> CacheRoom:
        room = size(*args, **options)
        assert room.memory is not None and room.needs is not None
        found["connected"] = sorted(memory.outside)
        planned = room.memory.total_bytes - room.memory.free_bytes + room.cache_bytes
        found["planned"] = planned + room.needs.total - room.needs.graph_nodes + room.graph_bytes
        return room

    def reports(watchdog: Watchdog) -> None:
        found["late"] = sorted(set(memory.outside) - {"graphs", *found["connected"]})
        found["graphs"] = memory.outside.get("graphs", 0)
        found["most"] = memory.peak_taken + memory.others
        sys.stderr.write(f"{TAKEN}{json.dumps(found)}\n")
        leave(watchdog)

    specdist.job.replica.replica.room_for_cache = noted
    Watchdog.leave = reports  # type: ignore[method-assign]
    return generate(given)
