"""Whether a device runs the project's kernels for sampling, found out by trying them once.

N distributions, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from specdist.sampling.processing.filters import plain_probabilities
from specdist.utils.errors import first_line

NUM_ROWS, VOCAB_SIZE = 4, 5000
TEMPERATURE, TOP_K, TOP_P = 0.8, 200, 0.9
# Sums in another order.
TOLERANCE = 1e-5
# Triton compiles for GPUs, and interprets on none.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

logger = logging.getLogger(__name__)


def sampling_kernels(scores_NV: Tensor) -> ModuleType | None:
    """:mod:`specdist.kernels.sampling` if it can be used on these logits or probabilities, else None."""
    if scores_NV.device.type != "cuda" or scores_NV.dtype not in DTYPES:
        return None
    return _kernels_of(scores_NV.device)


@functools.cache
def _kernels_of(device: torch.device) -> ModuleType | None:
    try:
        from specdist.kernels import sampling

        reason = _why_wrong(sampling, device)
    except Exception as error:  # Triton, its compilers and the driver raise errors of many kinds
        reason = first_line(error)
    if reason is None:
        logger.info("sampling on %s: Triton kernels", device)
        return sampling
    logger.warning(
        "sampling on %s: plain operations, which are slower; the kernels' check: %s", device, reason
    )
    return None


def _why_wrong(kernels: ModuleType, device: torch.device) -> str | None:
    """Against plain operations on the host."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    expected_NV, found_NV = (
        process(logits, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
        for process, logits in (
            (plain_probabilities, logits_NV),
            (kernels.processed_probabilities, logits_NV.to(device)),
        )
    )
    error = float((found_NV.cpu() - expected_NV).abs().max())
    if not error <= TOLERANCE:
        return f"distributions differ by {error:.3g}"
    uniforms_N = torch.rand(NUM_ROWS, dtype=torch.float64, generator=generator)
    drawn_N = kernels.draw(expected_NV.to(device), uniforms_N.to(device), not_finite=-1).cpu()
    cumulative_NV = expected_NV.cumsum(dim=1, dtype=torch.float64)
    wanted_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
    if not torch.equal(drawn_N, torch.searchsorted(cumulative_NV, wanted_N1, right=True)[:, 0]):
        return "draws differ"
    return None
