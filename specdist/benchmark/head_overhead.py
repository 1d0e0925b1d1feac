"""What a trained head takes of a draft step: behind every pass without it, just what it adds to one.

Two runners, with and without it, would differ by more than the head takes: by where in memory their tensors
lie. Behind a pass the head's own weights are as cold as they are in a run. What it takes depends on its shape
alone, so that heads of several depths are measured, none of which was trained.

B rows, C context tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdist.benchmark.overhead import NUM_WARMUPS, FlatPass
from specdist.benchmark.paged import PagedPair
from specdist.engine.device_clock import timed
from specdist.heads.head import TokenHead
from specdist.models.hidden import with_head_logits

# A draft step is soon over.
PASSES_PER_REPEAT = 10
NUM_CONTEXT_TOKENS = 16
DEPTHS = (0, 1, 3)


@dataclass(frozen=True, kw_only=True)
class HeadOverheadResult:
    """A draft step of one token for each of ``batch_size`` rows without a head, and what one of ``depth``
    residual layers adds: medians. ``share`` is that of the head in such a step: median of all, and its
    quartiles."""

    depth: int
    batch_size: int
    num_passes: int
    step_s: float
    head_s: float
    share: float
    lower: float
    upper: float


@torch.inference_mode()
def measure_heads(
    paged: PagedPair, batch_size: int, num_repeats: int, seed: int, *, uses_features: bool
) -> list[HeadOverheadResult]:
    """One result per depth; the depths take turns."""
    runner = paged.draft
    generator = torch.Generator().manual_seed(seed)
    context_BC, new_B1 = (
        torch.randint(paged.pair.vocab_size, (batch_size, length), generator=generator)
        for length in (NUM_CONTEXT_TOKENS, 1)
    )
    step = FlatPass(paged, runner, context_BC, new_B1)
    hidden_size = runner.model.config.get_text_config().hidden_size
    hidden_BH = torch.randn(batch_size, hidden_size, generator=generator).to(runner.device, runner.dtype)
    features_3B = torch.rand(3, batch_size, generator=generator).to(runner.device)
    heads = [
        TokenHead(hidden_size, depth, uses_features=uses_features).to(runner.device, runner.dtype)
        for depth in DEPTHS
    ]
    seconds: list[list[tuple[float, float]]] = [[] for _ in heads]
    for _ in range(NUM_WARMUPS + num_repeats * PASSES_PER_REPEAT):
        for head, found in zip(heads, seconds, strict=True):
            step_s, logits_BV = _timed(runner.device, step.run)
            adding = partial(with_head_logits, logits_BV, head, hidden_BH, features_3B)
            found.append((step_s, _timed(runner.device, adding)[0]))
    return [
        _result(depth, batch_size, np.array(found[NUM_WARMUPS:]))
        for depth, found in zip(DEPTHS, seconds, strict=True)
    ]


def _timed(device: torch.device, action: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """On a CPU the seconds of this thread alone: on a machine that others use too, a step is interrupted far
    oftener than a head, and the ratio would flatter the head."""
    if device.type != "cpu":
        return timed(device, action)
    begin = time.thread_time()
    result = action()
    return time.thread_time() - begin, result


def _result(depth: int, batch_size: int, seconds_N2: np.ndarray) -> HeadOverheadResult:
    steps_s, heads_s = seconds_N2.T
    lower, median, upper = np.quantile(heads_s / steps_s, (0.25, 0.5, 0.75)).tolist()
    return HeadOverheadResult(
        depth=depth,
        batch_size=batch_size,
        num_passes=len(seconds_N2),
        step_s=float(np.median(steps_s)),
        head_s=float(np.median(heads_s)),
        share=median,
        lower=lower,
        upper=upper,
    )
