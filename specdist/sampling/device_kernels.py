"""Whether a device runs the project's kernels for sampling, found out by trying them once.

N distributions, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from specdist.sampling.processing.row_filters import plain_probabilities
from specdist.utils.trial import check_difference, first_right

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
    trial = first_right({"Triton kernels": _kernels}, lambda kernels: _check(kernels, device))
    trial.report(logger, f"sampling on {device}", "plain operations, which are slower")
    return trial.found


def _kernels() -> ModuleType:
    # Triton is not everywhere.
    from specdist.kernels import sampling

    return sampling


def _check(kernels: ModuleType, device: torch.device) -> None:
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
    check_difference("distributions differ", error, TOLERANCE)
    uniforms_N = torch.rand(NUM_ROWS, dtype=torch.float64, generator=generator)
    drawn_N = kernels.draw(expected_NV.to(device), uniforms_N.to(device), not_finite=-1).cpu()
    cumulative_NV = expected_NV.cumsum(dim=1, dtype=torch.float64)
    wanted_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
    if not torch.equal(drawn_N, torch.searchsorted(cumulative_NV, wanted_N1, right=True)[:, 0]):
        raise ValueError("draws differ")
