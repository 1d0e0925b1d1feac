"""Trials of fused forms: modules whose parts are replaced by some that are cheap and communicate nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """Stands for a projection, which may communicate: a weight for each number."""

    def __init__(self, weight_W: Tensor) -> None:
        super().__init__()
        self.weight_W = weight_W

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight_W


class Attend(nn.Module):
    """Stands for a layer's attention: remembers what it is called with."""

    def __init__(self, weight_W: Tensor) -> None:
        super().__init__()
        self.weight_W = weight_W
        self.called_with: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.called_with = kwargs
        return hidden_states * self.weight_W, None


def twin_of(module: nn.Module) -> nn.Module:
    """The same module for trials, with its class's own code: it may be given other parameters and parts."""
    twin = copy.copy(module)
    vars(twin).pop("forward", None)
    return twin


def differences(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest and the mean of |difference| / (1 + |number|); infinite if shapes or dtypes differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return torch.inf, torch.inf
    relative = (found.float() - expected.float()).abs() / (1 + expected.float().abs())
    return float(relative.max()), float(relative.mean())
