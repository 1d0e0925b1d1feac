"""What a runner may use on a device besides the ragged pass in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from specdist.models.attention.kernel import PagedKernel, TritonKernel, VarlenKernel
from specdist.models.attention.library_kernels import FlashAttention3Kernel, FlashInferKernel
from specdist.models.passes.graphs import Capturer, CudaGraphs


@dataclass(frozen=True, kw_only=True)
class Acceleration:
    """What a runner may use besides the ragged pass in plain torch.

    Attributes:
        is_static: run short segments as static passes.
        capturer: records static passes; without it they run unrecorded.
        kernels: attention kernels to try, the best first.
        group: the ranks that share the model, and choose the same kernel; None for a whole model.
        is_fused: fuse the small steps of layers where that gives the same numbers.
        is_compiled: run Llama-like models as one call of compiled code where that gives the same numbers.
        keeps_latents: layers of latent attention keep latents, and not the keys and values of every head.
    """

    is_static: bool = False
    capturer: Capturer | None = None
    kernels: Sequence[PagedKernel] = ()
    group: dist.ProcessGroup | None = None
    is_fused: bool = False
    is_compiled: bool = False
    keeps_latents: bool = True

    @staticmethod
    def of(device: torch.device, group: dist.ProcessGroup | None = None) -> Acceleration:
        """The best choice on this device, for a model that the group shares. On a CPU a pass is not bound by
        launches, and padding costs time."""
        if device.type != "cuda":
            return Acceleration(is_compiled=True)
        return Acceleration(
            is_static=True,
            capturer=CudaGraphs(device, group),
            kernels=(VarlenKernel(), TritonKernel(), FlashAttention3Kernel(), FlashInferKernel()),
            group=group,
            is_fused=True,
        )
