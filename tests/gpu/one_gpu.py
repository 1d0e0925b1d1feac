"""The main job with all its ranks on one GPU, which they share: sums over ranks go through the host, by gloo.

NCCL refuses two ranks on one device, so this shows nothing of it, of the peers' memory or of times; but the
streams, events, pinned buffers and graphs of a draft on a rank of its own are real here, and so are targets
that DeepSpeed cuts. Started by a launcher, as jobs/generate.py is. Needs ``--cache_memory``: every rank would
take what is free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdist.cli import generate
from specdist.job.ranks import topology
from specdist.models.loading import loading
from specdist.models.passes.acceleration import Acceleration
from tests.gpu.without_peers import choose_sums


def local_device(name: str, local_rank: int = 0) -> torch.device:
    return torch.device("cuda", 0)


usual = Acceleration.of


def acceleration(
    device: torch.device, group: dist.ProcessGroup | None = None, **options: Any
) -> Acceleration:
    """Sums by gloo wait on the host, which no graph can record."""
    found = usual(device, group, **options)
    return found if group is None else replace(found, capturer=None)


meet, send_from_host, receive_on_host = dist.init_process_group, dist.send, dist.recv


def init_process_group(backend: str, **options: Any) -> None:
    meet(backend.replace("nccl", "gloo"), **options)


def send(tensor: Tensor, rank: int) -> None:
    """Gloo sums tensors of a GPU, but sends those of the host alone."""
    send_from_host(tensor.cpu(), rank)


def receive(tensor: Tensor, rank: int) -> None:
    received = torch.empty_like(tensor, device="cpu")
    receive_on_host(received, rank)
    tensor.copy_(received)


if __name__ == "__main__":
    topology.local_device = local_device
    Acceleration.of = staticmethod(acceleration)  # type: ignore[method-assign]
    loading.choose_sums = choose_sums
    dist.init_process_group, dist.send, dist.recv = init_process_group, send, receive  # type: ignore[assignment]
    generate.end()
