"""Which rank does what: 0 .. tp_size - 1 hold the target, the last one the draft; a lone one holds both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specdist.config import GenerateConfig
from specdist.engine.collectives import LEAD_RANK
from specdist.errors import UserError
from specdist.job.restart import num_restarts

# Far above any pass, and above loading. A rank that dies or hangs is noticed long before, by the watchdog.
WAIT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in the replica."""

    rank: int
    world_size: int
    tp_size: int
    uses_draft: bool
    device: torch.device

    @property
    def is_lead(self) -> bool:
        return self.rank == LEAD_RANK

    @property
    def is_colocated(self) -> bool:
        """Target and draft in one process."""
        return self.world_size == 1 and self.uses_draft

    @property
    def holds_target(self) -> bool:
        return self.rank < self.tp_size

    @property
    def draft_rank(self) -> int:
        return self.tp_size

    @property
    def role(self) -> str:
        """For log lines."""
        return self.role_of(self.rank)

    def role_of(self, rank: int) -> str:
        """What that rank of the replica does."""
        if self.world_size == 1:
            return "target+draft" if self.uses_draft else "target"
        return f"target {rank + 1}/{self.tp_size}" if rank < self.tp_size else "draft"


def rank_from_environment() -> int:
    """This process's rank, as the launcher set it."""
    return int(os.environ.get("RANK", "0"))


def topology_from_environment(config: GenerateConfig) -> Topology:
    """Read what the launcher set. Raises :class:`UserError` for a number of ranks that does not fit."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config.check_world(world_size)
    return Topology(
        rank=rank_from_environment(),
        world_size=world_size,
        tp_size=config.tp_size,
        uses_draft=config.uses_draft,
        device=local_device(config.device, int(os.environ.get("LOCAL_RANK", "0"))),
    )


def local_device(name: str, local_rank: int = 0) -> torch.device:
    """``--device`` for one process of this node. Raises :class:`UserError` for a GPU that is not there."""
    num_gpus = torch.cuda.device_count()
    if name == "cuda" and not num_gpus:
        raise UserError(
            "--device cuda, but torch sees no GPU here: use --device cpu or install its CUDA build"
        )
    if name == "cpu" or not num_gpus:
        return torch.device("cpu")
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local_ranks > num_gpus:
        raise UserError(
            f"{num_local_ranks} ranks were launched on this node, which has {num_gpus} GPUs, and every rank "
            "needs its own: launch fewer ranks or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def join_world(topology: Topology, init_method: str = "env://") -> None:
    """Meet the other ranks: integers go over gloo, tensors over the devices' own backend."""
    if topology.world_size == 1:
        return
    on_gpu = topology.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(topology.device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    # What the ranks have told each other before they started over must not be found again.
    store = dist.PrefixStore(f"world/{num_restarts()}", launcher_store(WAIT)) if num_restarts() else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=None if store else init_method,
        store=store,
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=WAIT,
    )


def launcher_store(timeout: timedelta) -> dist.Store:
    """A connection of its own to the key-value store through which the ranks of a launch meet."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )


def told_by_lead(topology: Topology, value: Any) -> Any:
    """The lead's value, on every rank; those of the others are not looked at."""
    if topology.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, LEAD_RANK)
    return box[0]


def init_deepspeed(topology: Topology) -> None:
    """Make DeepSpeed use the process group that exists. To be called on every rank, the draft's too."""
    import deepspeed

    if topology.device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce takes a sub-group for the whole world, and crashes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if topology.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
