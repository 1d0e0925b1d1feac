"""A replica that starts over with a smaller batch, in the same processes, after a rank ran out of memory.

A rank that runs out of memory within a pass leaves the others waiting in an all-reduce that never ends. So
every rank, or the only one, replaces its program by the same one (``exec``), which releases all memory; the
launcher sees the same processes. Finished rows are kept, and the size of the batch is in the run's manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import torch

# How often this replica has started over, its name, and the row and sample that ran alone in the smallest
# batch.
NUM_RESTARTS = "SPECDIST_NUM_RESTARTS"
REPLICA = "SPECDIST_REPLICA"
LONE_ROW = "SPECDIST_LONE_ROW"
FIRST_OWN_DESCRIPTOR = 3
# What RuntimeErrors say of torch's allocators, and of libraries that allocate themselves.
OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might succeed."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def num_restarts() -> int:
    """How often this replica has started over."""
    return int(os.environ.get(NUM_RESTARTS, "0"))


def former_replica() -> str | None:
    """The name that this replica had before it started over."""
    return os.environ.get(REPLICA) if num_restarts() else None


def remember_replica(name: str) -> None:
    """Keep the replica's name in case it starts over."""
    os.environ[REPLICA] = name


def remember_lone_row(row: tuple[int, int] | None) -> None:
    """Keep the row and sample that run alone, in the smallest batch; None if the batch can be smaller."""
    if row is None:
        os.environ.pop(LONE_ROW, None)
    else:
        os.environ[LONE_ROW] = f"{row[0]} {row[1]}"


def former_lone_row() -> tuple[int, int] | None:
    """The row and sample that ran alone when this replica started over."""
    words = os.environ.get(LONE_ROW, "").split()
    return (int(words[0]), int(words[1])) if num_restarts() and words else None


def start_over() -> None:
    """Replace this program by itself, from any thread. Raises OSError if that is not possible."""
    os.environ[NUM_RESTARTS] = str(num_restarts() + 1)
    logger.warning("starting over with half the batch")
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # Otherwise connections of libraries would stay open, and the other ranks wait until these are closed.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) >= FIRST_OWN_DESCRIPTOR:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(path.name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
