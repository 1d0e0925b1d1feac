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

from specdist.models.cache.float8 import SCALE_DTYPE, from_float8
from specdist.models.cache.writing import copy_into, plain_write, writer_on


class LayerShape(NamedTuple):
    """What a layer keeps of a token: ``num_heads`` keys of ``width`` numbers, and as many values of
    ``value_width``. Those of latent attention are the first numbers of the keys, and take no memory."""

    num_heads: int
    width: int
    value_width: int
    is_latent: bool = False


class KeyValueCache:
    """The pages' memory: per layer a matrix of keys, and one of values where they are not latent, one line
    per page. ``windowed`` layers have ``num_windowed_pages`` of their own. With ``is_float8`` these are bits
    of numbers in 8 bits, as of :mod:`specdist.models.cache.float8`, and scales have matrices beside them;
    ``dtype`` is always that of the tokens that are written, and read."""

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
        is_float8: bool = False,
    ) -> None:
        self.page_size, self.dtype, self.is_float8 = page_size, dtype, is_float8
        self.shapes, self.windowed = shapes, windowed
        self._write = writer_on(device, dtype, is_float8)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_scales: dict[int, Tensor] = {}
        self.value_scales: dict[int, Tensor] = {}
        # What is as wide in several layers of a group shares one block [layers, pages, page], so that tokens
        # are copied in all of them at once: as a rule keys and values of all layers, and their scales.
        held = [
            ((layer in windowed, shape.num_heads * width, is_scale), layer, place)
            for layer, shape in shapes.items()
            for width, place, is_scale in (
                (shape.width, self.keys, False),
                (shape.value_width, self.values, False),
                (1, self.key_scales, True),
                (1, self.value_scales, True),
            )
            if not (shape.is_latent and (place is self.values or place is self.value_scales))
            and (is_float8 or not is_scale)
        ]
        self._blocks: list[tuple[Tensor, int]] = []
        number_dtype = torch.uint8 if is_float8 else dtype
        for kind in sorted({kind for kind, *_ in held}):
            of_block = [(layer, place) for each, layer, place in held if each == kind]
            is_windowed, token_width, is_scale = kind
            num_lines = num_windowed_pages if is_windowed else num_pages
            block_dtype = SCALE_DTYPE if is_scale else number_dtype
            block = untouched_zeros((len(of_block), num_lines, page_size * token_width), block_dtype, device)
            self._blocks.append((block, token_width))
            for matrix, (layer, place) in zip(block, sorted(of_block, key=itemgetter(0)), strict=True):
                place[layer] = matrix

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, as views: [pages, page size, G, D]. With ``is_float8`` their bits."""
        heads, width, value_width, is_latent = self.shapes[layer]
        keys = self.keys[layer].view(-1, self.page_size, heads, width)
        if is_latent:
            return keys, keys[..., :value_width]
        return keys, self.values[layer].view(-1, self.page_size, heads, value_width)

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Scales of the layer's keys and values: [pages, page size, G], if they have any."""
        if not self.is_float8:
            return None
        shape = -1, self.page_size, self.shapes[layer].num_heads
        keys = self.key_scales[layer].view(shape)
        return keys, keys if self.shapes[layer].is_latent else self.value_scales[layer].view(shape)

    def read(self, layer: int, pages: Tensor | slice, *, reads_values: bool = False) -> Tensor:
        """The layer's keys, or its values, in these pages: [pages, page size × G × D] in ``dtype``. A view
        where pages are a slice of what is not in 8 bits."""
        heads, width, value_width, _ = self.shapes[layer]
        held, scales = (self.values, self.value_scales) if reads_values else (self.keys, self.key_scales)

        def taken(each: Tensor) -> Tensor:
            return each[pages] if isinstance(pages, slice) else each.index_select(0, pages)

        numbers = taken(held[layer])
        if not self.is_float8:
            return numbers
        shape = len(numbers), self.page_size, heads
        bits = numbers.view(*shape, value_width if reads_values else width)
        return from_float8(bits, taken(scales[layer]).view(shape), self.dtype).flatten(1)

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
            copy_into(self.keys[layer], cache_index_T, keys_TGD, self.key_scales.get(layer))
            return
        write = self._write if width == value_width else plain_write
        scales = (self.key_scales[layer], self.value_scales[layer]) if self.is_float8 else ()
        write(self.keys[layer], self.values[layer], cache_index_T, keys_TGD, values_TGD, *scales)


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a host only once they are written: a cache is sized for the worst case.

    Not empty memory: a masked key of uninitialised memory could be NaN, and 0 × NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
