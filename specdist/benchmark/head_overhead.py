"""What a trained head takes of a draft step: behind every pass without it, just what it adds to one.

Two runners, with and without it, would differ by more than the head takes: by where their copies of the
weights lie. Behind a pass the head's own weights are as cold as they are in a run.

B rows, C context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from specdist.benchmark.overhead import NUM_WARMUPS, FlatPass
from specdist.benchmark.paged import PagedPair
from specdist.benchmark.timing import timed
from specdist.models.hidden import HiddenStateHead, with_head_logits

# A draft step is soon over.
PASSES_PER_REPEAT = 10
NUM_CONTEXT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class HeadOverheadResult:
    """A draft step of one token for each of ``batch_size`` rows without the head, and what the head adds:
    medians. ``share`` is that of the head in such a step: median of all, and its quartiles."""

    batch_size: int
    num_passes: int
    step_s: float
    head_s: float
    share: float
    lower: float
    upper: float


@torch.inference_mode()
def measure_head(
    paged: PagedPair, head: HiddenStateHead, batch_size: int, num_repeats: int, seed: int
) -> HeadOverheadResult:
    """``head``: that of the pair's own headed runner."""
    generator = torch.Generator().manual_seed(seed)
    context_BC, new_B1 = (
        torch.randint(paged.pair.vocab_size, (batch_size, length), generator=generator)
        for length in (NUM_CONTEXT_TOKENS, 1)
    )
    runner = paged.draft
    step = FlatPass(paged, runner, context_BC, new_B1)
    hidden_size = runner.model.config.get_text_config().hidden_size
    hidden_BH = torch.randn(batch_size, hidden_size, generator=generator).to(runner.device, runner.dtype)
    features_3B = torch.rand(3, batch_size, generator=generator).to(runner.device)
    seconds = []
    for _ in range(NUM_WARMUPS + num_repeats * PASSES_PER_REPEAT):
        step_s, logits_BV = timed(runner.device, step.run)
        head_s, _ = timed(runner.device, partial(with_head_logits, logits_BV, head, hidden_BH, features_3B))
        seconds.append((step_s, head_s))
    steps_s, heads_s = np.array(seconds[NUM_WARMUPS:]).T
    lower, median, upper = np.quantile(heads_s / steps_s, (0.25, 0.5, 0.75)).tolist()
    return HeadOverheadResult(
        batch_size=batch_size,
        num_passes=len(steps_s),
        step_s=float(np.median(steps_s)),
        head_s=float(np.median(heads_s)),
        share=median,
        lower=lower,
        upper=upper,
    )
