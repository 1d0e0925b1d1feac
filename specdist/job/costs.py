"""What a pass of each model costs on this replica, measured once and frozen into the manifest.

How far the draft works ahead follows from these times, and how many branches it prepares: a restart reads
them from the manifest instead of measuring again, so that it repeats the same run.

R rows, Q tokens per row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdist.engine.proposals import DraftAhead
from specdist.models.flat import FlatBatch
from specdist.models.runner import ModelRunner

NUM_WARMUPS = 2
NUM_PASSES = 5
# The numbers of branches per row among which the costs decide.
BRANCH_COUNTS = (0, 1, 2, 4, 8)
# What is assumed of a pair of which nothing is known yet.
PRIOR_ACCEPTANCE = 0.8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Nanoseconds with all rows in flight.

    Attributes:
        target_pass_ns: of a pass over full verification blocks.
        draft_step_ns: of a draft step with no branches, and with each larger number of ``BRANCH_COUNTS`` that
            was measured.
    """

    target_pass_ns: int
    draft_step_ns: Sequence[int]

    def plan_ahead(self, max_draft_tokens: int, num_branches: int | None) -> DraftAhead:
        """The plan with the most expected tokens per second; ``num_branches`` None leaves them to the costs.

        A round takes as long as the slower of the target's pass and the work beside it. The first token ahead
        becomes a decision, the others candidates; the first step is the chain's own, the branches join it in
        the others.
        """
        return max(self._plans(max_draft_tokens, num_branches), key=self._tokens_per_ns)

    def _plans(self, max_draft_tokens: int, num_branches: int | None) -> Iterator[DraftAhead]:
        counts = BRANCH_COUNTS[: len(self.draft_step_ns)] if num_branches is None else (num_branches,)
        for num_tokens in range(1, max_draft_tokens + 2):
            for count in counts:
                yield DraftAhead(num_tokens=num_tokens, num_branches=count)

    def _tokens_per_ns(self, plan: DraftAhead) -> float:
        chain_ns = self.draft_step_ns[0]
        measured = BRANCH_COUNTS[: len(self.draft_step_ns)]
        wide_ns = float(np.interp(plan.num_branches, measured, self.draft_step_ns))
        drafting_ns = chain_ns + (plan.num_tokens - 1) * wide_ns
        caught = caught_share(plan.num_branches)
        num_tokens = tokens_per_pass(PRIOR_ACCEPTANCE, plan.num_tokens - 1, caught)
        return num_tokens / max(1.0, self.target_pass_ns, drafting_ns)


def tokens_per_pass(acceptance: float, num_candidates: int, caught: float) -> float:
    """Expected tokens that a row gets from a target pass when the draft works ahead.

    Tokens are accepted independently, with probability ``acceptance``; ``caught`` is the share of misses for
    which a branch was ready. A row is *ready* when it has its candidates, else it has none:

        P(ready | ready) = a^(n+1) + (1 - a^(n+1)) c        P(ready | not) = a + (1 - a) c
    """
    a, n, c = acceptance, num_candidates, caught
    if n == 0:
        return 1.0
    return 1.0 + ready_share(a, n, c) * sum(a**depth for depth in range(1, n + 1))


def ready_share(acceptance: float, num_candidates: int, caught: float) -> float:
    """The share of row-rounds that find their candidates ready, in the model of :func:`tokens_per_pass`."""
    a, n, c = acceptance, num_candidates, caught
    stays, comes = a ** (n + 1) + (1 - a ** (n + 1)) * c, a + (1 - a) * c
    return comes / (1 - stays + comes)


def caught_share(num_branches: int) -> float:
    """The share of misses that so many branches per row catch: 0.29, 0.42, 0.55, 0.67 for 1, 2, 4, 8."""
    return 1.0 - (1 + num_branches) ** -0.5


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
