"""The target as the engine sees it: one process, or the lead of several tensor-parallel ranks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specdist.cache.pages import PageUpdates
from specdist.engine.wire import wire_broadcast
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner

LEAD_RANK = 0


class Target(Protocol):
    """Runs passes of the target model."""

    @property
    def device(self) -> torch.device: ...

    def forward(self, updates: PageUpdates, batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        """Logits [N, V] of the tokens at ``logits_index``, after the page table's updates."""
        ...

    def close(self) -> None:
        """The last pass is over."""
        ...


class LocalTarget:
    """The whole target in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.device = runner.device

    def forward(self, updates: PageUpdates, batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        self._runner.update_pages(updates)
        return self._runner.forward(batch, logits_index)

    def close(self) -> None:
        """Nothing runs elsewhere."""


class LeadTarget:
    """The target's rank 0: tells the other ranks what to run, and runs it with them.

    Only this rank decides anything, so the ranks cannot disagree.
    """

    def __init__(self, runner: ModelRunner, group: dist.ProcessGroup) -> None:
        self._local = LocalTarget(runner)
        self._passes = wire_broadcast(LEAD_RANK, group)
        self.device = runner.device

    def forward(self, updates: PageUpdates, batch: FlatBatch, logits_index: np.ndarray) -> Tensor:
        self._passes.send(
            [
                updates.slots,
                updates.indices,
                updates.pages,
                np.asarray(batch.token_ids_T),
                batch.slots_T,
                batch.positions_T,
                logits_index,
            ]
        )
        return self._local.forward(updates, batch, logits_index)

    def close(self) -> None:
        self._passes.send([])


def follow_lead(runner: ModelRunner, group: dist.ProcessGroup) -> None:
    """What the target's other ranks do: run every pass that the lead announces, until it closes."""
    passes = wire_broadcast(LEAD_RANK, group)
    while arrays := passes.receive():
        slots, indices, pages, token_ids, token_slots, positions, logits_index = arrays
        runner.update_pages(PageUpdates(slots, indices, pages))
        batch = FlatBatch(
            token_ids.astype(np.int64), token_slots.astype(np.int64), positions.astype(np.int64)
        )
        runner.forward(batch, logits_index)
