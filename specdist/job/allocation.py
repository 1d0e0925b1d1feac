"""How many pages of keys and values a rank's memory holds.

On a GPU the cache gets what is free once the models are loaded, less what the passes need
(:mod:`specdist.models.reserve`). On a host, whose memory is shared with whatever else runs there, it is
bounded by a fraction of what is available; untouched pages take none of it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from specdist.cache.branch_pages import pages_per_branch
from specdist.config.generate import GenerateConfig
from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.collectives import RANK_ZERO
from specdist.engine.scheduler import SchedulerSettings
from specdist.job.preflight import ModelPlan
from specdist.job.topology import Topology
from specdist.models.checkpoint import Checkpoint
from specdist.models.memory import DeviceMemory, available_memory_bytes, device_memory
from specdist.models.reserve import PassLimits, Reserve, Sampling, gib, page_overhead, reserve
from specdist.models.runner import ModelRunner
from specdist.models.sizes import ModelSize, model_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """What the run may have in flight.

    Attributes:
        max_seq_len: tokens of the longest row.
        num_branch_rows, max_branch_tokens: of the draft, on the rank that holds it.
        works_ahead: the draft works while the target does.
    """

    scheduling: SchedulerSettings
    max_seq_len: int
    num_branch_rows: int = 0
    max_branch_tokens: int = 0
    works_ahead: bool = False

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_seq_len // PAGE_SIZE)

    @property
    def num_row_pages(self) -> int:
        """All rows at their longest."""
        return self.scheduling.num_slots * self.pages_per_row

    @property
    def num_branch_pages(self) -> int:
        return self.num_branch_rows * pages_per_branch(self.max_branch_tokens, PAGE_SIZE)


@dataclass(frozen=True, kw_only=True)
class HeldModel:
    """A model, or a part of one, on a GPU, and the largest of its passes there."""

    size: ModelSize
    tp_size: int
    limits: PassLimits

    @property
    def page_bytes(self) -> int:
        return PAGE_SIZE * self.size.cache_bytes_per_token(self.tp_size)

    @property
    def copied_page_bytes(self) -> int:
        return PAGE_SIZE * page_overhead(self.size, self.tp_size)


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """The pages that one rank has room for, and why.

    Attributes:
        num_pages: of the slots; those of branches are on top. Below 0 where not even these fit.
        cache_bytes: memory of all of them.
        budget_bytes: that the cache may take at most.
        memory, needs: of a GPU; None on a host.
    """

    name: str
    num_pages: int
    cache_bytes: int
    budget_bytes: int
    memory: DeviceMemory | None = None
    needs: Reserve | None = None

    def __str__(self) -> str:
        """Where the memory goes, in GiB."""
        used = f"cache {gib(self.cache_bytes)} ({self.num_pages} pages, {self.num_pages * PAGE_SIZE} tokens)"
        if self.memory is None or self.needs is None:
            return f"{self.name} in GiB: {gib(self.budget_bytes)} for the cache at most; {used}"
        taken = self.memory.total_bytes - self.memory.free_bytes
        return (
            f"{self.name} in GiB: {gib(self.memory.total_bytes)} in all = {gib(taken)} taken by weights and "
            f"libraries + {gib(self.needs.total)} reserved ({self.needs}) + {gib(self.budget_bytes)} for the "
            f"cache at most; {used}"
        )


def target_limits(
    limits: RowLimits, sampling: Sampling, *, decides: bool = True, has_kernel: bool = True
) -> PassLimits:
    """The largest target pass: prompts' chunks and verification blocks fill it up to
    ``max_num_batched_tokens``."""
    rows = limits.scheduling
    is_random = sampling.next_distributions == "rejection"
    return PassLimits(
        num_tokens=rows.max_num_batched_tokens,
        num_logits=min(rows.max_num_batched_tokens, rows.num_slots * (rows.max_draft_tokens + 1)),
        num_rows=rows.num_slots,
        row_tokens=limits.max_seq_len,
        # The distributions at the next tokens wait for the next round.
        num_kept=rows.num_slots if decides and is_random else 0,
        num_drawn=rows.num_slots if decides and is_random else 0,
        decides=decides,
        has_kernel=has_kernel,
    )


def draft_limits(limits: RowLimits, sampling: Sampling, *, has_kernel: bool = True) -> PassLimits:
    """The draft's largest passes: over the same prompts' chunks, and steps of all rows and branches."""
    rows = limits.scheduling
    num_rows = rows.num_slots + limits.num_branch_rows
    is_random = sampling.next_distributions == "rejection"
    steps = (1 + limits.works_ahead) * (rows.max_draft_tokens + 1)
    num_kept = rows.num_slots * steps + limits.num_branch_rows * limits.max_branch_tokens
    return PassLimits(
        # A first step runs a token again, and the last one of a block that was accepted whole.
        num_tokens=max(rows.max_num_batched_tokens, 2 * num_rows),
        num_logits=num_rows,
        num_rows=num_rows,
        row_tokens=limits.max_seq_len,
        num_kept=num_kept if is_random or limits.num_branch_rows else 0,
        num_drawn=rows.num_slots if is_random else 0,
        has_kernel=has_kernel,
    )


def sampling_of(config: GenerateConfig) -> Sampling:
    """As far as memory depends on it."""
    if config.temperature == 0:
        return Sampling(next_distributions="greedy")
    return Sampling(
        next_distributions="gumbel" if config.acceptance == "gumbel" else "rejection",
        has_top_p=config.top_p < 1,
    )


def needs_of(
    models: Sequence[HeldModel], sampling: Sampling, *, device_bytes: int, num_communicators: int
) -> Reserve:
    """Of one GPU with one model on it, or two that take turns."""
    return functools.reduce(
        Reserve.beside,
        (
            reserve(
                held.size,
                held.limits,
                sampling,
                device_bytes=device_bytes,
                tp_size=held.tp_size,
                num_communicators=num_communicators,
            )
            for held in models
        ),
    )


def room_on_gpu(
    models: Sequence[HeldModel],
    limits: RowLimits,
    sampling: Sampling,
    memory: DeviceMemory,
    *,
    num_communicators: int = 0,
    given_bytes: int | None = None,
    name: str = "memory",
) -> CacheRoom:
    """The pages of a GPU on which the models have been loaded. Pure arithmetic.

    Args:
        num_communicators: of NCCL that this rank takes part in.
        given_bytes: for the cache, instead of what is left.
    """
    needs = needs_of(models, sampling, device_bytes=memory.total_bytes, num_communicators=num_communicators)
    budget = max(0, memory.free_bytes - needs.total) if given_bytes is None else given_bytes
    page_bytes = sum(held.page_bytes for held in models)
    # A part of what is left is for copies of the pages; what was asked for is the cache's alone.
    copied_bytes = max(held.copied_page_bytes for held in models) if given_bytes is None else 0
    num_pages = min(
        budget // (page_bytes + copied_bytes) - limits.num_branch_pages,
        limits.num_row_pages,
    )
    return CacheRoom(
        name=name,
        num_pages=num_pages,
        cache_bytes=max(0, num_pages + limits.num_branch_pages) * page_bytes,
        budget_bytes=budget,
        memory=memory,
        needs=needs,
    )


def room_for_cache(
    config: GenerateConfig,
    models: ModelPlan,
    topology: Topology,
    limits: RowLimits,
    *,
    target: ModelRunner | None,
    draft: ModelRunner | None,
) -> CacheRoom:
    """What this rank, with the models that it has loaded, has room for, on a log line."""
    given, name = config.cache_bytes(), f"memory of {topology.device}"
    if topology.device.type == "cuda":
        room = room_on_gpu(
            _held_models(config, models, topology, limits, target=target, draft=draft),
            limits,
            sampling_of(config),
            device_memory(topology.device),
            num_communicators=_num_communicators(topology),
            given_bytes=given,
            name=name,
        )
        _warn_of_too_much(config, room)
    else:
        budget = given if given is not None else available_memory_bytes(_num_local_ranks())
        page_bytes = sum(runner.bytes_per_page(PAGE_SIZE) for runner in (target, draft) if runner is not None)
        num_pages = min(budget // page_bytes - limits.num_branch_pages, limits.num_row_pages)
        room = CacheRoom(
            name=name,
            num_pages=num_pages,
            cache_bytes=max(0, num_pages + limits.num_branch_pages) * page_bytes,
            budget_bytes=budget,
        )
    logger.info("%s", room)
    return room


def refusal(config: GenerateConfig, limits: RowLimits, room: CacheRoom) -> str:
    """What to tell a user whose memory does not hold one row; ``room`` is that of the rank with the least."""
    num_tokens = max(0, room.num_pages) * PAGE_SIZE
    lower = f", or lower --max_seq_len to {num_tokens}" if num_tokens else ""
    short = f"can hold {num_tokens} tokens, fewer than one sequence of --max_seq_len {limits.max_seq_len}"
    if config.cache_memory is not None:
        return f"--cache_memory {config.cache_memory} {short}: raise --cache_memory{lower}"
    if room.needs is None:
        return (
            f"--cache_memory was not given, and the {room.budget_bytes} bytes of free memory {short}: raise "
            f"--cache_memory{lower}"
        )
    return (
        f"the GPU memory left for keys and values {short}. {room}. Use more ranks (--tp_size), which share "
        "the weights; lower --max_num_batched_tokens and --max_num_seqs, with which the reserve "
        f"grows{lower or ', or --max_seq_len'}; or give --cache_memory, which is not checked against the "
        "reserve"
    )


def _held_models(
    config: GenerateConfig,
    models: ModelPlan,
    topology: Topology,
    limits: RowLimits,
    *,
    target: ModelRunner | None,
    draft: ModelRunner | None,
) -> list[HeldModel]:
    sampling = sampling_of(config)
    held = []
    if target is not None:
        passes = target_limits(
            limits,
            sampling,
            decides=topology.rank == RANK_ZERO,
            has_kernel=target.has_kernel(PAGE_SIZE),
        )
        held.append(HeldModel(size=_size(models.target, target), tp_size=topology.tp_size, limits=passes))
    if draft is not None:
        assert models.draft is not None
        passes = draft_limits(limits, sampling, has_kernel=draft.has_kernel(PAGE_SIZE))
        held.append(HeldModel(size=_size(models.draft, draft), tp_size=1, limits=passes))
    return held


def _size(checkpoint: Checkpoint, runner: ModelRunner) -> ModelSize:
    return model_size(
        checkpoint.name, checkpoint.config, runner.dtype.itemsize, trusts_code=checkpoint.trusts_code
    )


def _num_communicators(topology: Topology) -> int:
    """Of the target's ranks, and of rank 0 with the draft's."""
    if topology.world_size == 1:
        return 0
    of_target = topology.tp_size > 1 and topology.holds_target
    of_draft = topology.uses_draft and topology.rank in (RANK_ZERO, topology.draft_rank)
    return int(of_target) + int(of_draft)


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _warn_of_too_much(config: GenerateConfig, room: CacheRoom) -> None:
    assert room.memory is not None and room.needs is not None
    missing = room.cache_bytes + room.needs.total - room.memory.free_bytes
    if missing > 0 and config.cache_memory is not None:
        logger.warning(
            "--cache_memory %s leaves %s GiB less than passes may need: lower it if memory runs out",
            config.cache_memory,
            gib(missing),
        )
