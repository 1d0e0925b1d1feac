"""Collective operations between the ranks of a target group, with counts of messages and bytes. S ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

RANK_ZERO = 0


class Collectives:
    """Collectives of one group. Every rank calls the same ones in the same order.

    ``num_calls`` and ``num_bytes`` count what all ranks together have sent; they are the same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.num_calls = 0
        self.num_bytes = 0

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[S, ...]: all ranks' tensors, of equal shapes, on rank 0; None on the others."""
        self._count(tensor, (self.size - 1))
        tensor = tensor.contiguous()
        if self.rank != RANK_ZERO:
            dist.gather(tensor, None, RANK_ZERO, group=self._group)
            return None
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.gather(tensor, list(gathered), RANK_ZERO, group=self._group)
        return gathered

    def gather_everywhere(self, tensor: Tensor) -> Tensor:
        """[S, ...]: all ranks' tensors, of equal shapes, on every rank."""
        self._count(tensor, self.size * (self.size - 1))
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(gathered), tensor.contiguous(), group=self._group)
        return gathered

    def from_rank0(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        self._count(tensor, self.size - 1)
        dist.broadcast(tensor, RANK_ZERO, group=self._group)
        return tensor

    def _count(self, tensor: Tensor, num_copies: int) -> None:
        self.num_calls += 1
        self.num_bytes += tensor.nbytes * num_copies
