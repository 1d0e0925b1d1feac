"""The generating job on ranks of which one is too small: a pass over a position from ``LONGEST`` on does not
fit into the memory of rank ``SMALL_RANK``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdist.cli import generate
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner

LONGEST, SMALL_RANK = 50, "1"
forward = ModelRunner.forward


def limited(runner: ModelRunner, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
    if os.environ["RANK"] == SMALL_RANK and int(np.max(batch.positions_T)) >= LONGEST:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(runner, batch, logits_index)


def main(arguments: Sequence[str]) -> int:
    """In a forked process; when it starts over it is this script."""
    sys.orig_argv = [sys.executable, __file__, *arguments]
    ModelRunner.forward = limited  # type: ignore[method-assign]
    return generate(arguments)


if __name__ == "__main__":
    ModelRunner.forward = limited  # type: ignore[method-assign]
    generate.end()
