"""Memory of a replica: weights, buffers of passes and cache on every GPU, and the most sequences that fit.

The arithmetic is the job's own (:mod:`specdist.job.costs.allocation`), before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from specdist.engine.assembly import PAGE_SIZE
from specdist.engine.schedule.plan import SchedulerSettings
from specdist.job.costs.allocation import (
    BatchLimits,
    CacheRoom,
    HeldModel,
    draft_limits,
    page_bytes_of,
    room_on_gpu,
    target_limits,
)
from specdist.lab.plan.hardware import Gpu
from specdist.lab.plan.roofline import DEFAULTS
from specdist.lab.plan.simulate import PREFILL_CHUNK_TOKENS, Mode
from specdist.models.cache.windowed_pages import WindowedLayers, longest_window
from specdist.models.loading.memory import DeviceMemory
from specdist.models.sizes.reserve import Sampling
from specdist.models.sizes.sizes import ModelSize
from specdist.sampling.distributions import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Share:
    """The memory of one GPU, in bytes.

    Attributes:
        cache_bytes_per_row: cache of a sequence of the full length, with its branches.
        reserved_bytes: buffers of passes with ``most_rows`` running, or with one where none fits.
        usable_bytes: all but these and the driver's.
    """

    weight_bytes: int
    cache_bytes_per_row: int
    reserved_bytes: int
    usable_bytes: int
    most_rows: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A replica's memory: of each GPU that holds the target, and of the draft's own GPU if there is one."""

    target: Share
    draft: Share | None

    @property
    def most_rows(self) -> int:
        """Sequences of the full length that every GPU has room for: they share one page table."""
        return min(share.most_rows for share in (self.target, self.draft) if share is not None)


def _limits(
    num_rows: int,
    *,
    row_tokens: int,
    num_draft_tokens: int,
    num_state_numbers: int,
    num_branches: int = 0,
    is_asynchronous: bool = False,
) -> BatchLimits:
    """The limits of a job with this many running sequences."""
    block_tokens = num_draft_tokens + 1
    return BatchLimits(
        scheduling=SchedulerSettings(
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(PREFILL_CHUNK_TOKENS, num_rows * block_tokens),
            max_draft_tokens=num_draft_tokens,
            max_new_tokens=row_tokens,
            max_seq_len=row_tokens,
            seed=0,
        ),
        num_branch_slots=num_rows * num_branches,
        max_branch_tokens=block_tokens if num_branches else 0,
        is_asynchronous=is_asynchronous,
        num_state_numbers=num_state_numbers,
    )


def fit(
    target: ModelSize,
    draft: ModelSize | None,
    gpu: Gpu,
    mode: Mode,
    *,
    tp_size: int,
    row_tokens: int,
    num_draft_tokens: int = 0,
    num_branches: int = 0,
    settings: SamplingSettings = DEFAULTS,
) -> Fit:
    """The memory of a replica whose rows have up to ``row_tokens`` tokens, as the job plans it. ``settings``:
    how tokens are drawn."""
    draft = None if mode == "target only" else draft
    sampling = Sampling(has_top_p=settings.top_p < 1)
    if settings.is_greedy:
        sampling = Sampling(next_distributions="greedy")
    limits = partial(
        _limits,
        row_tokens=row_tokens,
        num_draft_tokens=0 if mode == "target only" else num_draft_tokens,
        num_state_numbers=0 if draft is None else draft.num_read_numbers,
    )
    of_target = int(tp_size > 1)
    if draft is None or mode == "colocated":
        both = _share(gpu, limits, sampling, of_target, target=target, tp_size=tp_size, draft=draft)
        return Fit(target=both, draft=None)
    is_asynchronous = mode in ("asynchronous", "branches")
    drafting = partial(limits, num_branches=num_branches, is_asynchronous=is_asynchronous)
    return Fit(
        target=_share(gpu, limits, sampling, of_target + 1, target=target, tp_size=tp_size),
        draft=_share(gpu, drafting, sampling, 1, draft=draft),
    )


def _share(
    gpu: Gpu,
    limits_of: Callable[[int], BatchLimits],
    sampling: Sampling,
    num_communicators: int,
    *,
    target: ModelSize | None = None,
    tp_size: int = 1,
    draft: ModelSize | None = None,
) -> Share:
    """The GPU of the rank that needs the most: the target's rank 0, or the draft. ``limits_of``: so many
    sequences."""

    def held(limits: BatchLimits, windowed: WindowedLayers | None = None) -> list[HeldModel]:
        models = []
        if target is not None:
            passes = target_limits(limits, sampling)
            models.append(HeldModel(size=target, tp_size=tp_size, limits=passes, windowed=windowed))
        if draft is not None:
            passes = draft_limits(limits, sampling)
            models.append(HeldModel(size=draft, tp_size=1, limits=passes))
        return models

    weight_bytes = sum(model.size.weight_bytes(model.tp_size) for model in held(limits_of(1)))
    if target is not None and draft is not None:
        weight_bytes -= draft.shared_bytes(tp_size)
    memory = DeviceMemory(
        total_bytes=gpu.memory_bytes,
        free_bytes=max(0, gpu.memory_bytes - gpu.reserved_bytes - weight_bytes),
    )

    def room(num_rows: int, windowed: WindowedLayers | None = None) -> CacheRoom:
        limits = limits_of(num_rows)
        models = held(limits, windowed)
        return room_on_gpu(models, limits, sampling, memory, num_communicators=num_communicators)

    def windowed_layers(num_rows: int) -> WindowedLayers | None:
        """The windowed layers, where the job gives them pages of their own."""
        windows = () if target is None else (layer.window for layer in target.layers)
        scheduling = limits_of(num_rows).scheduling
        window = longest_window(windows, scheduling.max_seq_len)
        windowed = window and scheduling.windowed_layers(window, PAGE_SIZE)
        if not windowed or room(num_rows, windowed).num_pages < room(num_rows).num_pages:
            return None
        return windowed

    def fits(num_rows: int) -> bool:
        num_pages = room(num_rows, windowed_layers(num_rows)).num_pages
        return num_pages >= limits_of(num_rows).num_seq_pages

    def cache_bytes(num_rows: int, windowed: WindowedLayers | None = None) -> int:
        limits = limits_of(num_rows)
        models = held(limits, windowed)
        followed = (limits.num_seq_pages + limits.num_branch_pages) * page_bytes_of(models)
        return sum(model.fixed_bytes for model in models) + followed

    most_rows = _largest(fits)
    num_rows = max(1, most_rows)
    needs = room(num_rows).needs
    assert needs is not None
    return Share(
        weight_bytes=weight_bytes,
        # Pages of windowed layers are also those of a batch's chunks.
        cache_bytes_per_row=min(
            cache_bytes(2) - cache_bytes(1), cache_bytes(num_rows, windowed_layers(num_rows)) // num_rows
        ),
        reserved_bytes=needs.total,
        usable_bytes=gpu.memory_bytes - gpu.reserved_bytes - needs.total,
        most_rows=most_rows,
    )


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number for which ``holds`` is true, as for all smaller ones; 0 if not for 1."""
    above = 1
    while holds(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below
