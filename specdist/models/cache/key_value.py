"""A model's side of the paged cache on one device: the memory of keys and values of every layer, how a pass
writes them (by one kernel where a device runs it, else two), and the model's copy of the page table.

Keys and values may be in 8 bits (float8_e4m3fn) with a scale of each token and head, which makes the largest
number of a head's key or value 448, the largest of the format. So it needs no calibration, a token's numbers
do not depend on other tokens, and what is large in one of them makes none of the others coarse. Scales are
bfloat16, which has the exponents of float32: 2 bytes for the D of a head.

T flat tokens, G key/value heads, D head width of keys and of values.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdist.models.cache.pages import PageUpdates
from specdist.models.cache.windowed_pages import NULL_PAGE
from specdist.utils.ranges import arange_segments
from specdist.utils.trial import first_right

LARGEST = 448.0
SCALE_DTYPE = torch.bfloat16

# The check's sizes: places that are far apart, heads and widths that no block divides.
PLACES, NUM_PLACES = (7, 0, 30, 13), 32
NUM_HEADS, WIDTH = 3, 40


class Writer(NamedTuple):
    """``write`` takes pages of keys and of values, places [T], keys and values [T, G, D]; of pages in 8 bits
    also those of the scales of keys and of values. ``rotate`` takes queries, cos and sin before the scales,
    rotates keys before it writes them, and gives rotated queries and keys."""

    write: Callable[..., None]
    rotate: Callable[..., tuple[Tensor, Tensor]] | None = None


logger = logging.getLogger(__name__)


def to_float8(tokens_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers' bits, uint8 [T, G, D], and their scales [T, G]. What is not finite makes its head so."""
    tokens_TGD = tokens_TGD.float()
    scales_TG = (tokens_TGD.abs().amax(-1) / LARGEST).to(SCALE_DTYPE)
    scales_TG = scales_TG.where(scales_TG != 0, 1.0)
    numbers_TGD = tokens_TGD / scales_TG.float()[..., None]
    return numbers_TGD.to(torch.float8_e4m3fn).view(torch.uint8), scales_TG


def from_float8(bits: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., G, D] of bits [..., G, D] with scales [..., G]."""
    return (bits.view(torch.float8_e4m3fn).float() * scales.float()[..., None]).to(dtype)


def plain_write(
    key_pages: Tensor,
    value_pages: Tensor,
    cache_index_T: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write each token's keys and values at ``cache_index_T``, counted in tokens from the first page."""
    copy_into(key_pages, cache_index_T, keys_TGD, key_scales)
    copy_into(value_pages, cache_index_T, values_TGD, value_scales)


def copy_into(
    pages: Tensor, cache_index_T: Tensor, tokens_TGD: Tensor, scale_pages: Tensor | None = None
) -> None:
    """Keys alone, or values alone."""
    if scale_pages is not None:
        tokens_TGD, scales_TG = to_float8(tokens_TGD)
        scale_pages.view(-1, scales_TG.shape[1]).index_copy_(0, cache_index_T, scales_TG)
    tokens = tokens_TGD.flatten(1)
    pages.view(-1, tokens.shape[1]).index_copy_(0, cache_index_T, tokens)


@functools.cache
def writer_on(device: torch.device, dtype: torch.dtype, is_float8: bool = False) -> Writer:
    """The fastest way that is right on this device, tried once; ``is_float8``: into pages in 8 bits."""
    plain = Writer(plain_write)
    if device.type != "cuda":
        return plain
    trial = first_right({"Triton kernel": _kernel}, lambda writer: _check(writer, device, dtype, is_float8))
    narrow = " as float8" if is_float8 else ""
    trial.report(logger, f"writing keys and values in {dtype}{narrow} on {device}", "plain operations")
    return trial.found or plain


def _kernel() -> Writer:
    # Triton is not everywhere.
    from specdist.kernels.rotary import write_rotated, write_tokens

    return Writer(write_tokens, write_rotated)


@torch.inference_mode()
def _check(writer: Writer, device: torch.device, dtype: torch.dtype, is_float8: bool) -> None:
    """Against the plain writing on the host, also by a rotation that changes nothing; the values are strided,
    as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    index_T = torch.tensor(PLACES)
    keys_TGD = torch.randn(len(index_T), NUM_HEADS, WIDTH, generator=generator).to(dtype)
    values_TGD = torch.randn(NUM_HEADS, len(index_T), WIDTH, generator=generator).to(dtype).transpose(0, 1)
    number_dtype = torch.uint8 if is_float8 else dtype
    expected = [torch.zeros(2, NUM_PLACES, NUM_HEADS * WIDTH, dtype=number_dtype)]
    if is_float8:
        expected.append(torch.zeros(2, NUM_PLACES, NUM_HEADS, dtype=SCALE_DTYPE))
    pages = [[each.to(device) for each in expected] for _ in range(2)]
    (keys, values), *scales = expected
    plain_write(keys, values, index_T, keys_TGD, values_TGD, *itertools.chain(*scales))
    tokens = [each.to(device) for each in (index_T, keys_TGD, values_TGD)]
    ones_TD = torch.ones_like(tokens[1][:, 0])
    assert writer.rotate is not None
    for found, write, more in (
        (pages[0], writer.write, ()),
        (pages[1], writer.rotate, (tokens[1], ones_TD, 0 * ones_TD)),
    ):
        (keys, values), *scales = found
        write(keys, values, *tokens, *more, *itertools.chain(*scales))
        if not all(torch.equal(each.cpu(), right) for each, right in zip(found, expected, strict=True)):
            raise ValueError("it writes other numbers")


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
    of numbers in 8 bits, as of :mod:`specdist.models.cache.key_value`, and scales have matrices beside them;
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
        self._writer = writer_on(device, dtype, is_float8)
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
        is_right = width == value_width and width % 2 == 0
        write: Callable[..., None] = self._writer.write if is_right else plain_write
        pages, scales = self._held(layer)
        write(*pages, cache_index_T, keys_TGD, values_TGD, *scales)

    def write_rotated(
        self, layer: int, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor, *rotation: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """As :meth:`write`, of keys that are rotated before; returns rotated queries and keys, and None where
        no kernel does both. ``rotation``: queries [T, H, D], cos and sin [T, D]."""
        shape, rotate = self.shapes[layer], self._writer.rotate
        own = LayerShape(keys_TGD.shape[1], keys_TGD.shape[2], values_TGD.shape[2])
        if rotate is None or own != shape or own.width != own.value_width or keys_TGD.dtype != self.dtype:
            return None
        pages, scales = self._held(layer)
        return rotate(*pages, cache_index_T, keys_TGD, values_TGD, *rotation, *scales)

    def _held(self, layer: int) -> list[list[Tensor]]:
        """The layer's memory of keys and values, and that of their scales."""
        kinds = (self.keys, self.values), (self.key_scales, self.value_scales)
        return [[each[layer] for each in kind if layer in each] for kind in kinds]


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a host only once they are written: a cache is sized for the worst case.

    Not empty memory: a masked key of uninitialised memory could be NaN, and 0 × NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


# Copies of keys and values between places in the cache, page × page_size + offset: sources and targets [T].
TokenCopies = tuple[np.ndarray, np.ndarray]


class BranchPageTable:
    """A model's copy of the table: the first slots are the sequences', and the last ones a draft's branches.

    A branch is not known to the target, so its own pages are fixed and lie after those that
    :class:`specdist.models.cache.pages.PageTable` hands out. Opening a branch points it at the pages of its
    sequence, up to the page in which it begins; the tokens before it in that page are copied. The copies to
    make are returned as places.

    B branches, T tokens to copy.

    ``windowed_pages``: the table of windowed layers, if they have pages of their own, as without branches
    they may.
    """

    def __init__(
        self, *, num_slots: int, num_pages: int, page_size: int, max_seq_len: int, num_branch_slots: int,
        max_branch_tokens: int, has_windowed: bool = False,
    ) -> None:  # fmt: skip
        """``num_pages``: of the slots; a branch has at most ``max_branch_tokens`` tokens of its own."""
        self._page_size = page_size
        self._num_slots = num_slots
        self._pages_per_branch = pages_per_branch(max_branch_tokens, page_size)
        own = num_pages + np.arange(num_branch_slots * self._pages_per_branch, dtype=np.int32)
        self._own_pages = own.reshape(num_branch_slots, self._pages_per_branch)
        width = -(-max_seq_len // page_size) + (self._pages_per_branch if num_branch_slots else 0)
        self.pages = np.zeros((num_slots + num_branch_slots, width), np.int32)
        # Passes without sequences, as those that are timed, may not write to the null page.
        self.windowed_pages = np.full_like(self.pages, NULL_PAGE + 1) if has_windowed else None
        assert not (has_windowed and num_branch_slots)
        self._rope_lengths = np.zeros(num_slots + num_branch_slots, np.int64)

    def update(self, updates: PageUpdates) -> None:
        """Apply updates of the table that this one follows."""
        if len(updates.slots):
            is_length = updates.indices < 0
            if is_length.any():
                self._rope_lengths[updates.slots[is_length]] = -1 - updates.indices[is_length]
                updates = updates.where(~is_length)
            if self.windowed_pages is not None:
                own = updates.where(updates.pages < 0)
                self.windowed_pages[own.slots, own.indices] = -1 - own.pages
                updates = updates.where(updates.pages >= 0)
            self.pages[updates.slots, updates.indices] = updates.pages

    def are_long(self, slots_T: np.ndarray, positions_T: np.ndarray, border: int) -> np.ndarray:
        """bool [T]: which tokens have the frequencies of a rope beyond its border."""
        return (self._rope_lengths[slots_T] > border) | (positions_T >= border)

    def open(self, slots_B: np.ndarray, branches_B: np.ndarray, positions_B: np.ndarray) -> TokenCopies:
        """Branch off each slot before a position; returns the copies that the branches' first pages need."""
        first_B = positions_B // self._page_size
        self.pages[branches_B] = self.pages[slots_B]
        self._rope_lengths[branches_B] = self._rope_lengths[slots_B]
        columns_BP = first_B[:, None] + np.arange(self._pages_per_branch)
        self.pages[branches_B[:, None], columns_BP] = self._own_pages[branches_B - self._num_slots]
        begins_B = first_B * self._page_size
        return self._copies(slots_B, branches_B, begins_B, positions_B - begins_B)

    def adopt(
        self, branches_B: np.ndarray, slots_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        """Each slot takes over ``lengths`` tokens of a branch, from position ``begins`` on."""
        return self._copies(branches_B, slots_B, begins_B, lengths_B)

    def _copies(
        self, sources_B: np.ndarray, targets_B: np.ndarray, begins_B: np.ndarray, lengths_B: np.ndarray
    ) -> TokenCopies:
        positions_T = np.repeat(begins_B, lengths_B) + arange_segments(lengths_B)
        pages_T, offsets_T = np.divmod(positions_T, self._page_size)
        sources_T, targets_T = (
            self.pages[np.repeat(slots_B, lengths_B), pages_T].astype(np.int64) * self._page_size + offsets_T
            for slots_B in (sources_B, targets_B)
        )
        return sources_T, targets_T


def pages_per_branch(max_branch_tokens: int, page_size: int) -> int:
    """A branch's own pages, enough wherever in a page it begins."""
    return -(-(page_size - 1 + max_branch_tokens) // page_size)
