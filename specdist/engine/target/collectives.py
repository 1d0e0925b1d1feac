"""Collective operations between the ranks of a target.

S ranks, T tokens, H hidden size.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

RANK_ZERO = 0


class Collectives:
    """Collectives of one group. Every rank calls the same ones in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[S, ...]: all ranks' tensors, of equal shapes, on rank 0; None on the others."""
        tensor = tensor.contiguous()
        if self.rank != RANK_ZERO:
            dist.gather(tensor, None, RANK_ZERO, group=self._group)
            return None
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.gather(tensor, list(gathered), RANK_ZERO, group=self._group)
        return gathered

    def gather_everywhere(self, tensor: Tensor) -> Tensor:
        """[S, ...]: all ranks' tensors, of equal shapes, on every rank."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(gathered), tensor.contiguous(), group=self._group)
        return gathered

    def from_rank0(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        dist.broadcast(tensor, RANK_ZERO, group=self._group)
        return tensor


def connect_target(group: dist.ProcessGroup, largest_TH: Tensor) -> None:
    """Make every collective of a target's ranks once, so that NCCL takes the memory of each.

    It connects the ranks anew for each algorithm, at the first use, and chooses the algorithm by the length:
    so sums of every length, up to that of the largest pass.
    """
    collectives, num_tokens = Collectives(group), len(largest_TH)
    while num_tokens:
        dist.all_reduce(largest_TH[:num_tokens], group=group)
        num_tokens //= 2
    for collective in (collectives.gather, collectives.gather_everywhere, collectives.from_rank0):
        collective(largest_TH[0])


def connect_draft(draft_rank: int, row_V: Tensor) -> None:
    """Send a distribution to the draft's rank, as in a round; both ranks call it."""
    if dist.get_rank() == RANK_ZERO:
        dist.send(row_V, draft_rank)
    else:
        dist.recv(row_V, RANK_ZERO)
