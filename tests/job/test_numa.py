"""Ranks are bound to the CPUs next to their GPUs, but only to CPUs that they may use."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdist.job.ranks.numa import bind_near_gpu

NODES = [0, 1, -1]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs: one on each of two NUMA nodes, and one of which nobody knows where. CPUs 0-3 and 4-7,10."""
    gpus = [
        SimpleNamespace(pci_domain_id=rank // 2, pci_bus_id=199 if rank == 1 else 7, pci_device_id=0)
        for rank in range(len(NODES))
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    for address, numa_node in zip(["0000:07:00.0", "0000:c7:00.0", "0001:07:00.0"], NODES, strict=True):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa_node}\n")
    for numa_node, cpus in enumerate(["0-3", "4-7,10"]):
        (tmp_path / f"sys/devices/system/node/node{numa_node}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/node{numa_node}/cpulist").write_text(f"{cpus}\n")
    return tmp_path / "sys"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Those that are set, for a process that may use CPUs 2 to 11."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(2, 12)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: found.append(set(cpus)))
    return found


@pytest.mark.parametrize(
    ("rank", "cpus"),
    [(0, {2, 3}), (1, {4, 5, 6, 7, 10}), (2, None), (3, None)],  # the last are not known: not bound
)
def test_a_rank_is_bound_to_the_cpus_next_to_its_gpu(
    node: Path, masks: list[set[int]], rank: int, cpus: set[int] | None
) -> None:
    bind_near_gpu(rank, system=node)
    assert all(mask == cpus for mask in masks) and bool(masks) == (cpus is not None)
