"""The memory plan of a rank with a GPU: what it asks of it, and what it says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdist.config.generate import GenerateConfig
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.job.costs import allocation
from specdist.job.costs.allocation import (
    PAGE_SIZE,
    BatchLimits,
    CacheRoom,
    HeldModel,
    draft_limits,
    room_for_cache,
    room_on_gpu,
    target_limits,
)
from specdist.job.ranks.topology import Topology
from specdist.job.replica import replica
from specdist.job.run.workload import Workload
from specdist.models.cache.windowed_pages import WindowedLayers
from specdist.models.loading import memory as memory_module
from specdist.models.loading.memory import DeviceMemory
from specdist.models.sizes.reserve import Sampling
from specdist.models.sizes.sizes import ModelSize
from tests.job.memory_plans import GIB, config_of, llama_1b, llama_70b, rows

PLAIN = Sampling()


@pytest.fixture
def large() -> ModelSize:
    return llama_70b()


@pytest.fixture
def small() -> ModelSize:
    return llama_1b()


class Runner:
    """The part of a model runner on which memory depends."""

    dtype = torch.bfloat16

    def has_kernel(self, page_size: int) -> bool:
        return page_size == PAGE_SIZE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls made to a GPU with 30 of 80 GiB free, 3 of them held by the allocator."""
    found: list[str] = []

    def mem_get_info(device: object) -> tuple[int, int]:
        found.append("mem_get_info")
        return (30 if "empty_cache" in found else 27) * GIB, 80 * GIB

    monkeypatch.setattr(memory_module.torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(memory_module.torch.cuda, "empty_cache", lambda: found.append("empty_cache"))
    return found


def rank_room(
    size: ModelSize,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    world_size: int = 5,
    draft: ModelSize | None = None,
    is_connected: bool = False,
) -> CacheRoom:
    monkeypatch.setattr(allocation, "_size", lambda checkpoint, runner: draft if checkpoint else size)
    topology = Topology(
        device=torch.device("cuda:0"), world_size=world_size, tp_size=4, rank=rank, uses_draft=True
    )
    models: Any = SimpleNamespace(
        target=None, draft=draft and SimpleNamespace(drafter=None), is_expert_parallel=False
    )
    held: Any = None if draft is None else Runner()
    return room_for_cache(
        config,
        models,
        topology,
        rows(),
        target=Runner(),
        draft=held,
        is_connected=is_connected,  # type: ignore[arg-type]
    )


def test_a_rank_releases_memory_of_loading_before_it_asks_how_much_is_free(
    large: ModelSize, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = rank_room(large, config_of(), monkeypatch, is_connected=True)
    assert calls == ["empty_cache", "mem_get_info"]
    assert room.memory == DeviceMemory(total_bytes=80 * GIB, free_bytes=30 * GIB)
    line = str(room)
    assert "\n" not in line
    for said in ("memory of cuda:0", "80.00 in all = 50.00 taken", "reserved (activations", "their kernels",
                 f"{room.num_pages} pages, {room.num_pages * PAGE_SIZE} tokens"):  # fmt: skip
        assert said in line, line
    # What NCCL has taken by now is not taken once more; before, it is estimated.
    assert "NCCL" not in line
    # Other ranks have no channel to the draft and plan no draft memory.
    first, other = (rank_room(large, config_of(), monkeypatch, rank=rank) for rank in (0, 1))
    assert first.needs is not None and other.needs is not None
    whole = rank_room(dataclasses.replace(large, is_shardable=False), config_of(), monkeypatch)
    assert first.can_share_more and not whole.can_share_more, "among more ranks than four"
    assert 0 < other.needs.nccl < first.needs.nccl and other.needs.logits < first.needs.logits


@dataclass(frozen=True)
class Fitting:
    """What of a replica's plan decides how many sequences run."""

    config: Any
    topology: Topology
    workload: Workload
    sizes: tuple[tuple[ModelSize, int], ...]
    memory: DeviceMemory
    num_seqs: int | None = None
    max_seq_len: int = 4096
    may_give_back, models = True, None

    @property
    def scheduling(self) -> SchedulerSettings:
        found = rows(num_rows=self.num_seqs or 256, max_draft_tokens=16, shares_room=True).scheduling
        return dataclasses.replace(found, max_seq_len=self.max_seq_len)

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(scheduling=self.scheduling)

    def room(self, *run: Any, windowed: WindowedLayers | None = None, **models: object) -> CacheRoom:
        """In the place of :func:`room_for_cache`, for the limits in ``run``."""
        *_, limits = run
        target, *draft = self.sizes
        passes = target_limits(limits, PLAIN)
        held = [HeldModel(size=target[0], tp_size=target[1], limits=passes, windowed=windowed)]
        held += [HeldModel(size=size, tp_size=1, limits=draft_limits(limits, PLAIN)) for size, _ in draft]
        return room_on_gpu(held, limits, PLAIN, self.memory)


@pytest.mark.parametrize(
    ("free_gib", "context_tokens", "expected"),
    # 112 KiB of cache a token: half of 1,500 tokens of 256 rows take 20 GiB, beside 12 for their passes.
    [(44, 1500, 256), (30, 1500, 128), (10, 1500, 32), (30, 100, 256), (3, 1500, 32)],
)
def test_as_many_sequences_run_as_the_cache_holds(
    large: ModelSize, small: ModelSize, free_gib: int, context_tokens: int, expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = Fitting(
        config=config_of(),
        topology=Topology(
            device=torch.device("cuda:0"), world_size=1, tp_size=1, rank=0, uses_draft=True
        ),
        workload=Workload(num_context_tokens=context_tokens),
        sizes=((large, 4), (small, 1)),
        memory=DeviceMemory(total_bytes=80 * GIB, free_bytes=free_gib * GIB),
    )  # fmt: skip
    monkeypatch.setattr(replica, "room_for_cache", plan.room)
    found: Any = replica._with_room(plan, SimpleNamespace(target=None, draft=None))  # type: ignore[arg-type]
    assert found.num_seqs == expected
    half = expected * context_tokens // 2
    assert expected == 32 or plan.room(found.limits).num_pages * PAGE_SIZE >= half


@pytest.mark.parametrize(
    ("free_gib", "context_tokens", "expected", "is_own"),
    [
        # Half of 8,000 tokens in 1 of 6 layers, and windows of 1,024 in the others: room for all 256.
        (44, 8000, None, True),
        # The pages of all layers would hold 58 of these sequences, and 39.
        (24, 8000, 128, True),
        (18, 8000, 64, True),
        # Windows do not help sequences that are as short.
        (20, 900, None, False),
        # Not one sequence of the longest has room with the pages of all layers.
        (8, 8000, 16, True),
    ],
)
def test_windows_leave_room_where_memory_is_tight(
    large: ModelSize, free_gib: int, context_tokens: int, expected: int | None, is_own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    windows = {index: None if index % 6 == 5 else 1024 for index in range(len(large.layers))}
    layers = tuple(
        dataclasses.replace(layer, window=windows[index]) for index, layer in enumerate(large.layers)
    )
    plan = Fitting(
        config=config_of(),
        topology=Topology(
            device=torch.device("cuda:0"), world_size=1, tp_size=1, rank=0, uses_draft=False
        ),
        workload=Workload(num_context_tokens=context_tokens),
        sizes=((dataclasses.replace(large, layers=layers), 4),),
        memory=DeviceMemory(total_bytes=80 * GIB, free_bytes=free_gib * GIB),
        max_seq_len=32_768,
    )  # fmt: skip
    monkeypatch.setattr(replica, "room_for_cache", plan.room)
    loaded: Any = SimpleNamespace(target=SimpleNamespace(windows=windows), draft=None)
    found: Any = replica._with_windows(plan, loaded)  # type: ignore[arg-type]
    assert found.num_seqs == expected
    assert (replica._rooms(found, loaded)[1].windowed is not None) is is_own


def test_only_a_gpu_is_filled_and_a_given_number_stays() -> None:
    given, alone, drafting = (
        GenerateConfig(target="t", prompts="p", output="o", **options)
        for options in ({"max_num_seqs": 7}, {}, {"draft": "d"})
    )
    assert [each.most_seqs("cpu") for each in (given, alone, drafting)] == [7, 32, 32]
    assert [each.most_seqs("cuda") for each in (given, alone, drafting)] == [7, 512, 256]
    assert not given.fills_memory("cuda") and not alone.fills_memory("cpu")


def test_logits_are_reserved_for_the_blocks_that_a_pass_may_have() -> None:
    """16 candidates of each of 256 rows would be 4,352; of 2,048 tokens they share half, and every row may
    end its prompt in the same pass."""
    limits = rows(num_rows=256, max_draft_tokens=16, shares_room=True)
    assert target_limits(limits, PLAIN).num_logits == 1024 + 256
    few = rows(num_rows=32, max_draft_tokens=16, shares_room=True)
    assert target_limits(few, PLAIN).num_logits == 32 * 17 + 32
    own = rows(num_rows=256, max_draft_tokens=5)
    assert target_limits(own, PLAIN).num_logits == 256 * 6
