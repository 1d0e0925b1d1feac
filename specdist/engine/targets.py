"""The target as the engine sees it: one process, or the lead of several tensor-parallel ranks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdist.cache.pages import PageUpdates
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner


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
