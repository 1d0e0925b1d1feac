"""The generating job on ranks of which one, or the only one, is too small: a pass over a position from
``LONGEST`` on does not fit into the memory of rank ``SMALL_RANK``. Started by a launcher, as the job is."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdist.cli import generate
from specdist.models.batch.flat import FlatBatch
from specdist.models.passes.runner import ModelRunner

# Environment variables: the script starts itself again with the arguments that it has.
LONGEST, SMALL_RANK = "SMALL_DEVICE_LONGEST", "SMALL_DEVICE_RANK"
forward = ModelRunner.forward


def limited(runner: ModelRunner, batch: FlatBatch, logits_index: Sequence[int] | np.ndarray) -> Tensor:
    is_long = int(np.max(batch.positions_T)) >= int(os.environ[LONGEST])
    if is_long and os.environ.get("RANK", "0") == os.environ[SMALL_RANK]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(runner, batch, logits_index)


if __name__ == "__main__":
    ModelRunner.forward = limited  # type: ignore[method-assign]
    generate.end()
