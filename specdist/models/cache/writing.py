"""How a pass writes its keys and values into the cache: one kernel where a device runs it, else two.

T flat tokens, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from specdist.utils.trial import first_right

# Of the check: places that are far apart, heads and widths that no block divides.
PLACES, NUM_PLACES = (7, 0, 30, 13), 32
NUM_HEADS, WIDTH = 3, 40

logger = logging.getLogger(__name__)

# Pages of keys and of values, places [T], keys and values [T, G, D].
Writer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def plain_write(
    key_pages: Tensor, value_pages: Tensor, cache_index_T: Tensor, keys_TGD: Tensor, values_TGD: Tensor
) -> None:
    """Write each token's keys and values at ``cache_index_T``, counted in tokens from the first page."""
    copy_into(key_pages, cache_index_T, keys_TGD)
    copy_into(value_pages, cache_index_T, values_TGD)


def copy_into(pages: Tensor, cache_index_T: Tensor, tokens_TGD: Tensor) -> None:
    """Keys alone, or values alone."""
    tokens = tokens_TGD.flatten(1)
    pages.view(-1, tokens.shape[1]).index_copy_(0, cache_index_T, tokens)


@functools.cache
def writer_on(device: torch.device, dtype: torch.dtype) -> Writer:
    """The fastest way that is right on this device, tried once."""
    if device.type != "cuda":
        return plain_write
    trial = first_right({"Triton kernel": _kernel}, lambda writer: _check(writer, device, dtype))
    trial.report(logger, f"writing keys and values in {dtype} on {device}", "plain operations")
    return trial.found or plain_write


def _kernel() -> Writer:
    # Triton is not everywhere.
    from specdist.kernels.layers import write_tokens

    return write_tokens


@torch.inference_mode()
def _check(writer: Writer, device: torch.device, dtype: torch.dtype) -> None:
    """Against the plain writing on the host; the values are strided, as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    index_T = torch.tensor(PLACES)
    keys_TGD = torch.randn(len(index_T), NUM_HEADS, WIDTH, generator=generator).to(dtype)
    values_TGD = torch.randn(NUM_HEADS, len(index_T), WIDTH, generator=generator).to(dtype).transpose(0, 1)
    expected = torch.zeros(2, NUM_PLACES, NUM_HEADS * WIDTH, dtype=dtype)
    found = expected.to(device)
    plain_write(expected[0], expected[1], index_T, keys_TGD, values_TGD)
    writer(found[0], found[1], index_T.to(device), keys_TGD.to(device), values_TGD.to(device))
    if not torch.equal(found.cpu(), expected):
        raise ValueError("it writes other numbers")
