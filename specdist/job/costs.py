"""What a pass of each model costs on this replica, measured once and frozen into the manifest.

How far the draft works ahead follows from these times, and with it the length of every block: a restart reads
them from the manifest instead of measuring again, so that it repeats the same run.

R rows, Q tokens per row.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner

NUM_WARMUPS = 2
NUM_PASSES = 5


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Nanoseconds of a target pass over full verification blocks and of a draft step, of all rows."""

    target_pass_ns: int
    draft_step_ns: int

    def num_ahead_tokens(self, most: int) -> int:
        """Draft steps that fit into a target pass, from 1 to ``most``."""
        return max(1, min(most, self.target_pass_ns // max(1, self.draft_step_ns)))


def measure_pass_ns(runner: ModelRunner, *, num_rows: int, num_tokens: int) -> int:
    """Median time of a pass of ``num_tokens`` tokens for each of ``num_rows`` rows, at short contexts.

    Every rank of a sharded model must call it at the same time. It overwrites the cache.
    """
    batch = FlatBatch(
        np.zeros(num_rows * num_tokens, np.int64),
        np.repeat(np.arange(num_rows), num_tokens),
        np.tile(np.arange(num_tokens), num_rows),
    )
    index = np.arange(len(batch))
    times = []
    for _ in range(NUM_WARMUPS + NUM_PASSES):
        begin = time.perf_counter_ns()
        runner.forward(batch, index)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        times.append(time.perf_counter_ns() - begin)
    return int(statistics.median(times[NUM_WARMUPS:]))
