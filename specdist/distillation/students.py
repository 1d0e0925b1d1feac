"""A draft in training, whatever its kind.

A new kind is a class with these methods, a value of ``--kind``, and a line in
:func:`specdist.distillation.run.open_student`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from specdist.distillation.data import Batch


class Student(Protocol):
    """A draft in training on one device, with all that its teacher needs."""

    @property
    def module(self) -> nn.Module:
        """What is trained: its parameters that require gradients."""

    @property
    def hidden_size(self) -> int:
        """Width of the draft, which decides the learning rate."""

    @property
    def num_parameters(self) -> int:
        """Of the whole draft, as it is served."""

    def loss(self, batch: Batch) -> Tensor:
        """A sum over the completions' tokens, with gradients."""

    def acceptances(self, batch: Batch) -> Sequence[np.ndarray]:
        """Of every completion the probability that the engine accepts the draft's token, at each of its
        places: see :mod:`specdist.distillation.acceptance`."""

    def save(self, folder: Path) -> None:
        """Write the folder that ``--draft`` takes."""
