"""The roles of ranks: 0 .. tp_size - 1 hold the target; the draft has one more, or shares rank 0 with it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from specdist.config.generate import GenerateConfig
from specdist.engine.target.sharded_target import RANK_ZERO
from specdist.job.ranks.restart import num_restarts
from specdist.utils.errors import UserError
from specdist.utils.packages import check_installed

# A rank may have to wait for hours for another that reads its weights from slow storage. The watchdog notices
# after --rank_timeout that no rank makes progress; collectives give up long after that.
COLLECTIVE_MARGIN = timedelta(days=1)
UNWATCHED_TIMEOUT = timedelta(minutes=30)
LONGEST_TIMEOUT_S = timedelta(days=30).total_seconds()
# The launcher's store exists before its ranks start: if it is not found, the launcher has ended.
AGENT_STORE_TIMEOUT_S = 30.0


Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in the replica."""

    rank: int
    world_size: int
    tp_size: int
    uses_draft: bool
    device: torch.device
    # See --rank_timeout.
    rank_timeout_s: float = 600.0

    @property
    def is_rank0(self) -> bool:
        return self.rank == RANK_ZERO

    @property
    def is_colocated(self) -> bool:
        """The draft shares rank 0, and its device, with the target or a shard of it."""
        return self.uses_draft and self.world_size == self.tp_size

    @property
    def holds_target(self) -> bool:
        return self.rank < self.tp_size

    @property
    def draft_rank(self) -> int:
        return RANK_ZERO if self.is_colocated else self.tp_size

    @property
    def holds_draft(self) -> bool:
        return self.uses_draft and self.rank == self.draft_rank

    @property
    def collective_timeout(self) -> timedelta:
        """Timeout of all process groups of the replica."""
        return COLLECTIVE_MARGIN + timedelta(seconds=min(self.rank_timeout_s, LONGEST_TIMEOUT_S))

    @property
    def has_draft_rank(self) -> bool:
        """Whether the draft is on a rank of its own."""
        return self.uses_draft and not self.is_colocated

    @property
    def draft_placement(self) -> str | None:
        """``own`` or ``shared``; None without a draft."""
        return ("shared" if self.is_colocated else "own") if self.uses_draft else None

    @property
    def role(self) -> str:
        """The rank's role, for log lines."""
        return self.role_of(self.rank)

    def role_of(self, rank: int) -> str:
        """The role of a rank of the replica."""
        if self.world_size == 1:
            return "target+draft" if self.uses_draft else "target"
        if rank >= self.tp_size:
            return "draft"
        holds_both = self.is_colocated and rank == self.draft_rank
        return f"target {rank + 1}/{self.tp_size}{'+draft' * holds_both}"


def rank_from_environment() -> int:
    """This process's rank, set by the launcher."""
    return int(os.environ.get("RANK", "0"))


def topology_from_environment(config: GenerateConfig) -> Topology:
    """The topology by the launcher's variables. Raises :class:`UserError` for a number of ranks that does not
    fit."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config.check_world(world_size)
    if config.tp_size > 1:
        check_installed("deepspeed", f"--tp_size {config.tp_size}", "use --tp_size 1")
    return Topology(
        rank=rank_from_environment(),
        world_size=world_size,
        tp_size=config.tp_size,
        uses_draft=config.uses_draft_model,
        device=local_device(config.device, int(os.environ.get("LOCAL_RANK", "0"))),
        rank_timeout_s=config.rank_timeout,
    )


def local_device(name: str, local_rank: int = 0) -> torch.device:
    """``--device`` for one process of this node. Raises :class:`UserError` for a GPU that does not exist."""
    num_gpus = torch.cuda.device_count()
    if name == "cuda" and not num_gpus:
        raise UserError(f"--device cuda, but torch sees no GPU here: {why_no_gpu()}, or use --device cpu")
    if name == "cpu" or not num_gpus:
        return torch.device("cpu")
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_local_ranks > num_gpus:
        raise UserError(
            f"{num_local_ranks} ranks were launched on this node, which has {num_gpus} GPUs, and every rank "
            "needs its own: launch fewer ranks or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def why_no_gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> str:
    """What is to be done where torch finds no GPU. ``driver``: where NVIDIA's says its version."""
    if not torch.backends.cuda.is_built():
        return "install its CUDA build"
    if not driver.exists():
        return "this node has no NVIDIA driver, so start it on one that has"
    first = driver.read_text(errors="replace").splitlines()[0]
    return (
        f"it is built for CUDA {torch.version.cuda}, for which the driver may be too old ({first}), so "
        "install a build for an older CUDA (SPECDIST_CUDA=cu126, as jobs/install.sh says), or look at "
        "CUDA_VISIBLE_DEVICES"
    )


def join_world(topology: Topology, init_method: str | None = None) -> None:
    """Make this rank's GPU the current one, and meet the other ranks. CPU tensors are sent with gloo, those
    of GPUs with NCCL.

    ``init_method``: where they meet, instead of the store of :func:`meeting_store`; then there is no
    watchdog, and collectives give up earlier.
    """
    on_gpu = topology.device.type == "cuda"
    if on_gpu:
        # Also in a world of one: kernels and events go to the current device, whatever their tensors'.
        torch.cuda.set_device(topology.device)
    if topology.world_size == 1:
        return
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    store = None if init_method else meeting_store(topology, "world")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=init_method,
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=UNWATCHED_TIMEOUT if init_method else topology.collective_timeout,
        )
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise RuntimeError(
            f"the ranks were not connected by gloo ({error}): if this node's hostname has no address, name a "
            "network interface that all nodes have, such as GLOO_SOCKET_IFNAME=eth0"
        ) from error


def hosts_store(topology: Topology) -> bool:
    """Whether this rank hosts the ranks' key-value store: rank 0 does, unless the launcher does."""
    return topology.is_rank0 and not launcher_has_store()


def meeting_store(topology: Topology, purpose: str) -> dist.Store:
    """A new connection to the key-value store through which the ranks of a launch meet.

    Its keys are separate from those of other purposes, and from those before the replica started over. Raises
    RuntimeError if the store cannot be reached.
    """
    wait_s = AGENT_STORE_TIMEOUT_S if launcher_has_store() else math.inf
    wait_s = min(wait_s, topology.rank_timeout_s, LONGEST_TIMEOUT_S)
    store = _connect(wait_s, is_host=hosts_store(topology))
    store.set_timeout(topology.collective_timeout)
    return dist.PrefixStore(f"{purpose}/{num_restarts()}", store)


def _connect(wait_s: float, *, is_host: bool) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        return dist.TCPStore(
            host,
            int(port),
            is_master=is_host,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        whose = "the launcher" if launcher_has_store() else "rank 0"
        raise RuntimeError(
            f"{whose}, which hosts the ranks' rendezvous store ({host}:{port}), was not reached within "
            f"{wait_s:.0f} s: it has ended, never started, or is unreachable from here ({error})"
        ) from error


def launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def broadcast_from_rank0(topology: Topology, value: Any) -> Any:
    """Rank 0's value, on every rank; the values of the other ranks are ignored."""
    if topology.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, RANK_ZERO)
    return box[0]


def gathered(topology: Topology, value: Value) -> list[Value]:
    """The value of every rank, in their order, on every rank."""
    found = [value] * topology.world_size
    if topology.world_size > 1:
        dist.all_gather_object(found, value)
    return found


def init_deepspeed(topology: Topology) -> None:
    """Make DeepSpeed use the existing process group. All ranks must call it, also the draft's."""
    import deepspeed

    if topology.device.type == "cpu":
        # DeepSpeed's shared-memory all-reduce takes a sub-group for the whole world, and crashes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if topology.device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
