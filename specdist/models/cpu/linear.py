"""Linear layers on a CPU in float32 with oneDNN, which torch itself uses for lower precisions only.

With few tokens a pass is bound by reading the weights, and torch's BLAS for float32 reads them at a fraction
of the memory's speed. On a 2-core AMD EPYC with torch 2.13, milliseconds for a 32000 × 1024 matrix:

    tokens      1     2     4     6     8    16    48   128   512
    torch     7.6  15.9  21.5  21.8  21.5  24.9  39.1  69.3   219
    oneDNN    2.8   5.7   6.4   6.9   7.7   9.9  19.5  42.8   177

A small matrix, which stays in the processor's cache, gets slower by the cost of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_WEIGHTS = 2**18


class OneDnnLinears:
    """Switches a model's large linear layers to oneDNN, only inside :meth:`active`: other code may share the
    model."""

    def __init__(self, model: nn.Module) -> None:
        self._is_active = False
        if not torch.backends.mkldnn.is_available():
            return
        for module in model.modules():
            if (
                isinstance(module, nn.Linear)
                and type(module).forward is nn.Linear.forward
                and module.weight.numel() >= MIN_WEIGHTS
                and module.weight.dtype == torch.float32
            ):
                module.forward = partial(self._forward, module)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not self._is_active:
            return F.linear(x, layer.weight, layer.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
        return output
