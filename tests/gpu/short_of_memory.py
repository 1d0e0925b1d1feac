"""The main job on ranks of which one asks its device, in the middle of a pass, for more memory than there is.

Once: the ranks then start over in their own processes. Started by a launcher, as jobs/generate.py is.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from specdist.cli import generate
from specdist.job.ranks.restart import num_restarts
from specdist.models.passes.runner import ModelRunner

# After the first passes of a run; of rank 1, which other ranks wait for.
RANK, PASS = "1", 6
MORE_THAN_THERE_IS = 2**50

forward = ModelRunner.forward
num_passes = 0


def greedy(runner: ModelRunner, *args: Any) -> torch.Tensor:
    global num_passes
    num_passes += 1
    if os.environ.get("RANK") == RANK and num_passes == PASS and not num_restarts():
        torch.empty(MORE_THAN_THERE_IS, device=runner.device)
    return forward(runner, *args)


if __name__ == "__main__":
    ModelRunner.forward = greedy  # type: ignore[method-assign]
    generate.end()
