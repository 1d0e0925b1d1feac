"""What a GPU is given for a pass, counted by ``python -m tests.gpu.counts``, which writes ``counted.json``.
What each of it costs is a figure of the GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdist.lab.plan.model.hardware import Gpu

Side = Literal["target", "draft"]

# The host's work for a pass: choosing the bucket, packing the inputs. Assumed.
PACKING_S = 100e-6
# How much faster than memory kernels read what the kernels before them have just written, which is still in
# the device's cache. Assumed.
CACHED_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """A pass of one side, with the sampling and the bookkeeping around it: rejection rule, fixed lengths.

    Attributes:
        kernels_per_layer, kernels_outside_of_layers: in graphs.
        eager_kernels: launched by themselves; ``copies``: between host and device.
        replays: of graphs.
        synchronisations: waits of the host for the device.
        tensors_per_layer: read and written between the kernels of a layer, in tensors of [tokens, hidden
            size].
    """

    kernels_per_layer: float = 0.0
    kernels_outside_of_layers: float = 0.0
    eager_kernels: float = 0.0
    copies: float = 0.0
    replays: float = 0.0
    synchronisations: float = 0.0
    tensors_per_layer: float = 0.0

    def kernels(self, num_layers: int) -> float:
        """Kernels of the pass in graphs."""
        return num_layers * self.kernels_per_layer + self.kernels_outside_of_layers

    def seconds(self, num_layers: int, gpu: Gpu) -> float:
        """Of a pass beside what its kernels read, write and compute. On a CPU nothing is recorded, and
        nothing is waited for."""
        if gpu.is_host:
            return (self.kernels(num_layers) + self.eager_kernels) * gpu.eager_kernel_s
        return (
            self.kernels(num_layers) * gpu.kernel_s
            + self.replays * gpu.graph_s
            + (self.eager_kernels + self.copies) * gpu.eager_kernel_s
            + self.synchronisations * gpu.wait_s
            + (PACKING_S if self.replays else 0.0)
        )


def _read(side: Side) -> PassCounts:
    text = (Path(__file__).parent / "counted.json").read_text(encoding="utf-8")
    return PassCounts(**json.loads(text)[side])


TARGET_PASS, DRAFT_PASS = _read("target"), _read("draft")
NO_COUNTS = PassCounts()
