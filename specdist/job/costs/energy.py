"""The energy that a replica's GPUs take, by their own counters, where nvidia-ml-py is installed.

A counter is read when generation begins and whenever a shard is complete, never in a round.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from specdist.data.stats.shard import Stats
from specdist.job.ranks.topology import Topology, gathered

logger = logging.getLogger(__name__)


class EnergyMeter:
    """Of some GPUs of this machine."""

    def __init__(self, library: ModuleType, uuids: Sequence[str]) -> None:
        """``uuids``: as torch tells them. Raises the library's errors where a GPU has no counter."""
        self._library = library
        self._handles = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        self._read_mj, self._num_tokens = self._counted_mj(), 0

    def count(self, num_tokens: int) -> None:
        """Tokens of a completion that was generated meanwhile."""
        self._num_tokens += num_tokens

    def read(self, stats: Stats) -> None:
        """Add what was taken and generated since the last time. What a counter does not tell is not added."""
        with contextlib.suppress(self._library.NVMLError):
            now_mj = self._counted_mj()
            # A driver that is loaded anew begins at 0.
            if now_mj >= self._read_mj:
                stats.num_millijoules += now_mj - self._read_mj
                stats.num_metered_tokens += self._num_tokens
            self._read_mj, self._num_tokens = now_mj, 0

    def _counted_mj(self) -> int:
        return sum(map(self._library.nvmlDeviceGetTotalEnergyConsumption, self._handles))


def energy_meter(topology: Topology) -> EnergyMeter | None:
    """Of all GPUs of the replica, on its rank 0; None where one of them is not an NVIDIA GPU of this machine
    with a counter, or without the library. A collective of all ranks."""
    if topology.device.type != "cuda":
        return None
    places = set(gathered(topology, (socket.gethostname(), _uuid(topology.device))))
    hosts, uuids = ({place[index] for place in places} for index in (0, 1))
    if not topology.is_rank0 or len(hosts) > 1 or None in uuids:
        return None
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        meter = EnergyMeter(library, sorted(map(str, uuids)))
    except library.NVMLError as error:
        logger.info("the GPUs' energy is not measured: %s", error)
        return None
    logger.info("the energy of %d GPUs is measured by their counters", len(uuids))
    return meter


def _uuid(device: torch.device) -> str | None:
    found: Any = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)
