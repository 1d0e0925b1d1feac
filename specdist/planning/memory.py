"""Does it fit: weights and cache on every GPU of a replica, and the most rows that are left room for."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.job.replica import PAGE_SIZE
from specdist.models.forks import pages_per_branch
from specdist.models.memory import RESERVED_FRACTION
from specdist.models.sizes import ModelSize
from specdist.planning.hardware import Gpu
from specdist.planning.simulate import Mode


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one GPU holds, in bytes; ``branch_bytes_per_row`` is memory of the row's branches."""

    weight_bytes: int
    cache_bytes_per_row: int
    branch_bytes_per_row: int = 0
    usable_bytes: int

    @property
    def free_bytes(self) -> int:
        """For the cache; negative where not even the weights fit."""
        return self.usable_bytes - self.weight_bytes

    @property
    def most_rows(self) -> int:
        return max(0, self.free_bytes) // (self.cache_bytes_per_row + self.branch_bytes_per_row)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A replica's memory: of each GPU that holds the target, and of the draft's own if it has one."""

    target: Share
    draft: Share | None

    @property
    def most_rows(self) -> int:
        """Rows at their full length that all GPUs have room for: one page table serves all of them."""
        return min(share.most_rows for share in (self.target, self.draft) if share is not None)


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
) -> Fit:
    """The memory of a replica whose rows have up to ``row_tokens`` tokens, as the job divides it up.

    Of every GPU :data:`RESERVED_FRACTION` is left for what passes need beside weights and cache.
    """
    usable_bytes = int(gpu.memory_bytes * (1 - RESERVED_FRACTION)) - gpu.reserved_bytes
    num_pages = -(-row_tokens // PAGE_SIZE)
    weights = target.weight_bytes(tp_size)
    page = target.cache_bytes_per_token(tp_size) * PAGE_SIZE
    if draft is None or mode == "target only":
        return Fit(target=_share(weights, num_pages * page, usable_bytes), draft=None)
    draft_weights, draft_page = draft.weight_bytes(1), draft.cache_bytes_per_token(1) * PAGE_SIZE
    if mode == "colocated":
        both = _share(weights + draft_weights, num_pages * (page + draft_page), usable_bytes)
        return Fit(target=both, draft=None)
    num_branch_pages = num_branches * pages_per_branch(num_draft_tokens + 1, PAGE_SIZE)
    return Fit(
        target=_share(weights, num_pages * page, usable_bytes),
        draft=Share(
            weight_bytes=draft_weights,
            cache_bytes_per_row=num_pages * draft_page,
            branch_bytes_per_row=num_branch_pages * draft_page,
            usable_bytes=usable_bytes,
        ),
    )


def _share(weight_bytes: int, cache_bytes_per_row: int, usable_bytes: int) -> Share:
    return Share(
        weight_bytes=weight_bytes, cache_bytes_per_row=cache_bytes_per_row, usable_bytes=usable_bytes
    )
