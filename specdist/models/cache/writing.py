"""How a pass writes its keys and values into the cache: one kernel where a device runs it, else two.

T flat tokens, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from specdist.models.cache.float8 import SCALE_DTYPE, to_float8
from specdist.utils.trial import first_right

# The check's sizes: places that are far apart, heads and widths that no block divides.
PLACES, NUM_PLACES = (7, 0, 30, 13), 32
NUM_HEADS, WIDTH = 3, 40

logger = logging.getLogger(__name__)

# Pages of keys and of values, places [T], keys and values [T, G, D]; of pages in 8 bits also those of the
# scales of keys and of values.
Writer = Callable[..., None]


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
    if device.type != "cuda":
        return plain_write
    make = _float8_kernel if is_float8 else _kernel
    trial = first_right({"Triton kernel": make}, lambda writer: _check(writer, device, dtype, is_float8))
    narrow = " as float8" if is_float8 else ""
    trial.report(logger, f"writing keys and values in {dtype}{narrow} on {device}", "plain operations")
    return trial.found or plain_write


def _kernel() -> Writer:
    # Triton is not everywhere.
    from specdist.kernels.layers import write_tokens

    return write_tokens


def _float8_kernel() -> Writer:
    from specdist.kernels.float8_cache import write_float8_tokens

    return write_float8_tokens


@torch.inference_mode()
def _check(writer: Writer, device: torch.device, dtype: torch.dtype, is_float8: bool) -> None:
    """Against the plain writing on the host; the values are strided, as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    index_T = torch.tensor(PLACES)
    keys_TGD = torch.randn(len(index_T), NUM_HEADS, WIDTH, generator=generator).to(dtype)
    values_TGD = torch.randn(NUM_HEADS, len(index_T), WIDTH, generator=generator).to(dtype).transpose(0, 1)
    number_dtype = torch.uint8 if is_float8 else dtype
    expected = [torch.zeros(2, NUM_PLACES, NUM_HEADS * WIDTH, dtype=number_dtype)]
    if is_float8:
        expected.append(torch.zeros(2, NUM_PLACES, NUM_HEADS, dtype=SCALE_DTYPE))
    found = [each.to(device) for each in expected]
    (keys, values), *scales = expected
    plain_write(keys, values, index_T, keys_TGD, values_TGD, *itertools.chain(*scales))
    (keys, values), *scales = found
    tokens = [each.to(device) for each in (index_T, keys_TGD, values_TGD)]
    writer(keys, values, *tokens, *itertools.chain(*scales))
    if not all(torch.equal(each.cpu(), right) for each, right in zip(found, expected, strict=True)):
        raise ValueError("it writes other numbers")
