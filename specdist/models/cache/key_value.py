"""The memory of the paged cache on one device: keys and values of every layer.

T flat tokens, G key/value heads, D head width of keys and of values.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.writing import copy_into, plain_write, writer_on


class LayerShape(NamedTuple):
    """What a layer keeps of a token: ``num_heads`` keys of ``width`` numbers, and as many values of
    ``value_width``. Those of latent attention are the first numbers of the keys, and take no memory."""

    num_heads: int
    width: int
    value_width: int
    is_latent: bool = False

    @property
    def num_numbers(self) -> int:
        return self.num_heads * (self.width + (0 if self.is_latent else self.value_width))


class KeyValueCache:
    """The pages' memory: per layer a matrix of keys, and one of values where they are not latent, one line
    per page. ``windowed`` layers have ``num_windowed_pages`` of their own."""

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windowed: frozenset[int] = frozenset(),
        num_windowed_pages: int = 0,
    ) -> None:
        self.page_size, self.dtype = page_size, dtype
        self.shapes, self.windowed = shapes, windowed
        self._write = writer_on(device, dtype)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        # What is as wide in several layers of a group shares one block [layers, pages, page], so that tokens
        # are copied in all of them at once: as a rule keys and values of all layers.
        held = [
            ((layer in windowed, shape.num_heads * width), layer, place)
            for layer, shape in shapes.items()
            for width, place in ((shape.width, self.keys), (shape.value_width, self.values))
            if not (shape.is_latent and place is self.values)
        ]
        self._blocks: list[tuple[Tensor, int]] = []
        for kind in sorted({kind for kind, *_ in held}):
            of_block = [(layer, place) for each, layer, place in held if each == kind]
            is_windowed, token_width = kind
            num_lines = num_windowed_pages if is_windowed else num_pages
            block = untouched_zeros((len(of_block), num_lines, page_size * token_width), dtype, device)
            self._blocks.append((block, token_width))
            for matrix, (layer, place) in zip(block, sorted(of_block, key=itemgetter(0)), strict=True):
                place[layer] = matrix

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, as views: [pages, page size, G, D]."""
        heads, width, value_width, is_latent = self.shapes[layer]
        keys = self.keys[layer].view(-1, self.page_size, heads, width)
        if is_latent:
            return keys, keys[..., :value_width]
        return keys, self.values[layer].view(-1, self.page_size, heads, value_width)

    def copy_tokens(self, sources_T: Tensor, targets_T: Tensor) -> None:
        """Copy keys and values between places (page × page_size + offset); no target is a source. All layers
        have the same pages."""
        for block, token_width in self._blocks:
            tokens = block.view(len(block), -1, token_width)
            tokens.index_copy_(1, targets_T, tokens.index_select(1, sources_T))

    def write(self, layer: int, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor) -> None:
        """Write each token's key and value at ``cache_index_T`` (page × page_size + offset)."""
        _, width, value_width, is_latent = self.shapes[layer]
        if is_latent:
            copy_into(self.keys[layer], cache_index_T, keys_TGD)
            return
        write = self._write if width == value_width else plain_write
        write(self.keys[layer], self.values[layer], cache_index_T, keys_TGD, values_TGD)

    @staticmethod
    def bytes_per_page(shapes: dict[int, LayerShape], page_size: int, dtype: torch.dtype) -> int:
        return page_size * dtype.itemsize * sum(shape.num_numbers for shape in shapes.values())


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a host only once they are written: a cache is sized for the worst case.

    Not empty memory: a masked key of uninitialised memory could be NaN, and 0 × NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
