"""What a trained head takes of a draft step: the same pass of the draft with and without it, in turn.

Both runners have the same model in the same memory. A pass takes a hundred times as long as a head, so each
ratio is that of two passes one behind the other, and half of the pairs begin with either.

B rows, C context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specdist.benchmark.overhead import NUM_WARMUPS, FlatPass
from specdist.benchmark.paged import PagedPair

# Over a few dozen pairs of passes quartiles are wide on a shared machine, and a pass is soon over.
PASSES_PER_REPEAT = 10
NUM_CONTEXT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class HeadOverheadResult:
    """A draft step of one token for each of ``batch_size`` rows: its median without the head, and how much
    longer it is with it, as a share: median of the pairs and its quartiles."""

    batch_size: int
    num_pairs: int
    step_s: float
    share: float
    lower: float
    upper: float


def measure_head(paged: PagedPair, batch_size: int, num_repeats: int, seed: int) -> HeadOverheadResult:
    """The pair must have been given a head."""
    assert paged.headed is not None
    generator = torch.Generator().manual_seed(seed)
    context_BC, new_B1 = (
        torch.randint(paged.pair.vocab_size, (batch_size, length), generator=generator)
        for length in (NUM_CONTEXT_TOKENS, 1)
    )
    passes = [FlatPass(paged, runner, context_BC, new_B1) for runner in (paged.draft, paged.headed)]
    num_pairs = num_repeats * PASSES_PER_REPEAT
    seconds = np.zeros((NUM_WARMUPS + num_pairs, 2))
    for number, row in enumerate(seconds):
        for index in (0, 1) if number % 2 else (1, 0):
            row[index] = passes[index].seconds()
    without, having = seconds[NUM_WARMUPS:].T
    lower, median, upper = np.quantile(having / without - 1, (0.25, 0.5, 0.75)).tolist()
    return HeadOverheadResult(
        batch_size=batch_size,
        num_pairs=num_pairs,
        step_s=float(np.median(without)),
        share=median,
        lower=lower,
        upper=upper,
    )
