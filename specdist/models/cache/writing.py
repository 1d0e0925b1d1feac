"""How a pass writes its keys and values into the cache: one kernel where a device runs it, else two.

T flat tokens, G key/value heads, D head width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from specdist.utils.errors import first_line

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
    for pages, tokens_TGD in ((key_pages, keys_TGD), (value_pages, values_TGD)):
        tokens = tokens_TGD.flatten(1)
        pages.view(-1, tokens.shape[1]).index_copy_(0, cache_index_T, tokens)


@functools.cache
def writer_on(device: torch.device, dtype: torch.dtype) -> Writer:
    """The fastest way that is right on this device, tried once."""
    if device.type != "cuda":
        return plain_write
    try:
        from specdist.kernels.layers import write_tokens

        is_right = _is_right(write_tokens, device, dtype)
        reason = None if is_right else "it writes other numbers"
    except Exception as error:  # Triton, its compilers and the driver raise errors of many kinds
        reason = first_line(error)
    if reason is not None:
        logger.warning(
            "writing keys and values in %s on %s: plain operations; the kernel's check: %s",
            dtype, device, reason,
        )  # fmt: skip
        return plain_write
    logger.info("writing keys and values in %s on %s: Triton kernel", dtype, device)
    return write_tokens


@torch.inference_mode()
def _is_right(writer: Writer, device: torch.device, dtype: torch.dtype) -> bool:
    """Against the plain writing on the host; the values are strided, as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    index_T = torch.tensor(PLACES)
    keys_TGD = torch.randn(len(index_T), NUM_HEADS, WIDTH, generator=generator).to(dtype)
    values_TGD = torch.randn(NUM_HEADS, len(index_T), WIDTH, generator=generator).to(dtype).transpose(0, 1)
    expected = torch.zeros(2, NUM_PLACES, NUM_HEADS * WIDTH, dtype=dtype)
    found = expected.to(device)
    plain_write(expected[0], expected[1], index_T, keys_TGD, values_TGD)
    writer(found[0], found[1], index_T.to(device), keys_TGD.to(device), values_TGD.to(device))
    return torch.equal(found.cpu(), expected)
