"""The memory of the paged cache on one device: keys and values of every layer.

T flat tokens, G key/value heads, D head width.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.writing import writer_on


class KeyValueCache:
    """The pages' memory: per layer a matrix of keys and one of values, one line per page."""

    def __init__(
        self,
        shapes: dict[int, tuple[int, int]],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.shapes = shapes
        self._write = writer_on(device, dtype)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        # Layers of one shape share one block [2 × layers, pages, page], so that tokens are copied in all of
        # them at once.
        self._blocks: list[tuple[Tensor, int]] = []
        for shape in sorted(set(shapes.values())):
            layers = [layer for layer, other in shapes.items() if other == shape]
            token_width = shape[0] * shape[1]
            block = untouched_zeros((2 * len(layers), num_pages, page_size * token_width), dtype, device)
            self._blocks.append((block, token_width))
            for index, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = block[2 * index], block[2 * index + 1]

    def copy_tokens(self, sources_T: Tensor, targets_T: Tensor) -> None:
        """Copy keys and values between places (page × page_size + offset); no target is a source."""
        for block, token_width in self._blocks:
            tokens = block.view(len(block), -1, token_width)
            tokens.index_copy_(1, targets_T, tokens.index_select(1, sources_T))

    def write(self, layer: int, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> None:
        """Write each token's key and value at ``cache_index_T`` (page × page_size + offset)."""
        self._write(self.keys[layer], self.values[layer], cache_index_T, keys_TGD, values_TGD)

    @staticmethod
    def bytes_per_page(shapes: dict[int, tuple[int, int]], page_size: int, dtype: torch.dtype) -> int:
        return 2 * page_size * dtype.itemsize * sum(heads * width for heads, width in shapes.values())


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a host only once they are written: a cache is sized for the worst case.

    Not empty memory: a masked key of uninitialised memory could be NaN, and 0 × NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
