"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over ranges of all weights side by side.

F weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# As in jobs/distill.py.
BETAS, WEIGHT_DECAY, EPSILON = (0.9, 0.95), 0.01, 1e-8


@dataclass
class RangedAdamW:
    """A step is one of every range."""

    weights_F: Tensor
    gradients_F: Tensor
    num_steps: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.means_F, self.squares_F = torch.zeros_like(self.weights_F), torch.zeros_like(self.weights_F)

    def begin(self) -> None:
        """A step of all ranges."""
        self._before = self.num_steps.clone()

    def step(self, begin: int, end: int, rate: float) -> None:
        part, count = slice(begin, end), self._before.clone()
        gradients = self.gradients_F[part]
        adamw(
            [self.weights_F[part]], [gradients], [self.means_F[part]], [self.squares_F[part]], [], [count],
            amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=rate, weight_decay=WEIGHT_DECAY, eps=EPSILON,
            maximize=False,
        )  # fmt: skip
        gradients.zero_()
        self.num_steps = count
