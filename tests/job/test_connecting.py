"""What the ranks of a GPU job do before their first round, seen on a CPU: nothing here is a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specdist.job.ranks.topology import Topology, join_world
from specdist.job.replica import replica
from specdist.job.replica.replica import connect_target


def test_a_gpu_becomes_the_current_one_in_a_world_of_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go to the current device, whatever that of their tensors."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = torch.device("cuda", 1)
    join_world(Topology(rank=0, world_size=1, tp_size=1, uses_draft=True, device=device))
    assert chosen == [device]


def test_nccl_is_connected_before_the_cache_takes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def rooms(*_: Any, is_connected: bool = True) -> Any:
        done.append(f"rooms, connected: {is_connected}")
        return SimpleNamespace(graph_bytes=0), SimpleNamespace(num_pages=1, windowed=None)

    monkeypatch.setattr(replica, "_rooms", rooms)
    monkeypatch.setattr(replica, "_with_windows", lambda plan, loaded: plan)
    monkeypatch.setattr(replica, "_connect", lambda *_: done.append("connect"))
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(fills_memory=lambda device: False),
        topology=SimpleNamespace(device=torch.device("cuda"), world_size=2),
    )
    loaded: Any = None
    replica._agree_on_pages(plan, loaded, replica.Activity())
    assert done == ["rooms, connected: False", "connect", "rooms, connected: True"]


def test_sums_of_every_length_and_every_other_collective_are_connected() -> None:
    """NCCL takes memory at the first use of each algorithm, and chooses it by the length."""
    rooms = "specdist.engine.target.sharded_target.dist", "specdist.job.replica.replica.dist"
    with patch(rooms[0]) as dist, patch(rooms[1], dist):
        dist.get_world_size.return_value, dist.get_rank.return_value = 2, 0
        connect_target(dist.group, torch.zeros(6, 4))
    assert [len(call.args[0]) for call in dist.all_reduce.call_args_list] == [6, 3, 1]
    assert dist.gather.called and dist.all_gather.called and dist.broadcast.called
