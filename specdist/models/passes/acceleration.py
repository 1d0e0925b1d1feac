"""What a runner may use on a device besides the ragged pass in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from specdist.models.attention.expanding import kind_of_expanded
from specdist.models.attention.expansion import Expansion
from specdist.models.attention.kernel import PagedKernel, TritonKernel
from specdist.models.attention.library_kernels import FlashAttention3Kernel, FlashInferKernel
from specdist.models.attention.probe import ProbePages, choose_kernel
from specdist.models.families.dry_run import LayerShapes
from specdist.models.passes.graphs import CudaGraphs
from specdist.models.passes.products import Choice

logger = logging.getLogger(__name__)


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
        has_float8_cache: keys and values are kept in 8 bits (:mod:`specdist.models.cache.key_value`).
        products: an earlier choice of those of few tokens (:mod:`specdist.models.passes.products`).
    """

    is_static: bool = False
    capturer: CudaGraphs | None = None
    kernels: Sequence[PagedKernel] = ()
    group: dist.ProcessGroup | None = None
    is_fused: bool = False
    is_compiled: bool = False
    keeps_latents: bool = True
    has_float8_cache: bool = False
    products: Choice | None = None

    @staticmethod
    def of(
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        has_float8_cache: bool = False,
        products: Choice | None = None,
    ) -> Acceleration:
        """The best choice on this device, for a model that the group shares. On a CPU a pass is not bound by
        launches, and padding costs time."""
        if has_float8_cache and device.type == "cpu":
            logger.info("keys and values in 8 bits: by transformers' layers, for compiled ones read none")
        if device.type != "cuda":
            return Acceleration(is_compiled=not has_float8_cache, has_float8_cache=has_float8_cache)
        return Acceleration(
            is_static=True,
            capturer=CudaGraphs(device, group),
            kernels=(
                TritonKernel(),
                FlashAttention3Kernel(),
                FlashAttention3Kernel(num_splits=8),
                FlashInferKernel(),
            ),
            group=group,
            is_fused=True,
            has_float8_cache=has_float8_cache,
            products=products,
        )


class AttentionKernels:
    """The attention kernels of one model, which are tried once for every size of pages. Ranks that share the
    model ask for them at the same time."""

    def __init__(
        self, acceleration: Acceleration, shapes: LayerShapes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._acceleration, self._shapes, self._dtype, self._device = acceleration, shapes, dtype, device
        self._chosen: dict[tuple[int, Expansion | None], PagedKernel | None] = {}

    def of(self, page_size: int, expansion: Expansion | None = None) -> PagedKernel | None:
        """The kernel for pages of this size; None where none works. With an ``expansion``, for what is
        expanded."""
        key, own, kinds = (page_size, expansion), self._acceleration, self._shapes.kinds
        if key not in self._chosen:
            is_float8 = own.has_float8_cache and expansion is None
            if expansion is not None:
                kinds = [kind_of_expanded(expansion, each) for each in kinds if each.rules.is_latent]
            pages = ProbePages(page_size, self._dtype, self._device, is_float8)
            self._chosen[key] = choose_kernel(own.kernels, kinds, pages, group=own.group)
        return self._chosen[key]
