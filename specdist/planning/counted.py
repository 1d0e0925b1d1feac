"""What a GPU is given for a pass, counted by ``python -m tests.gpu.counts``, and what each of it is taken to
cost. The counts are in ``counted.json``, which that command writes; the times are assumptions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Side = Literal["target", "draft"]

US = 1e-6
# A kernel of a replayed graph beside reading, writing and computing: its start and end, and the gap to the
# next. Assumed. "Getting Started with CUDA Graphs" (Gray 2019, developer.nvidia.com/blog/cuda-graphs) reports
# 3.4 microseconds from one short kernel to the next in a graph, most of them the kernel's own.
KERNEL_S = 2 * US
# A kernel or a copy that is launched by itself: the host's work in Python and in torch, which a device waits
# for that has nothing else to do. Assumed.
EAGER_KERNEL_S = 5 * US
# Launching a graph of any size. Assumed.
GRAPH_S = 20 * US
# The host waits for the device, and the device for what the host launches next. Assumed.
SYNCHRONISATION_S = 15 * US
# The host's work for a pass: choosing the bucket, packing the inputs. Assumed.
PACKING_S = 100 * US
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

    def on_gpu_s(self, num_layers: int) -> float:
        """Seconds of a pass beside what its kernels read, write and compute."""
        return (
            self.kernels(num_layers) * KERNEL_S
            + self.replays * GRAPH_S
            + (self.eager_kernels + self.copies) * EAGER_KERNEL_S
            + self.synchronisations * SYNCHRONISATION_S
            + (PACKING_S if self.replays else 0.0)
        )

    def on_host_s(self, num_layers: int) -> float:
        """The same on a CPU, where nothing is recorded and nothing is waited for."""
        return (self.kernels(num_layers) + self.eager_kernels) * EAGER_KERNEL_S


def _read(side: Side) -> PassCounts:
    text = (Path(__file__).parent / "counted.json").read_text(encoding="utf-8")
    return PassCounts(**json.loads(text)[side])


TARGET_PASS, DRAFT_PASS = _read("target"), _read("draft")
NO_COUNTS = PassCounts()
