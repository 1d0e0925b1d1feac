"""A replica that starts over in its own processes: for what only a smaller batch can help.

Where the target is sharded, a rank that runs out of memory in the middle of a pass has left the others
waiting in a sum that will never come. Every rank then replaces its program by the same one, which gives all
memory back; the launcher sees the same processes. How much smaller the batch is to be is in the run's
manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

# How often this replica has started over, under which name, and which row and sample was alone in the
# smallest batch.
NUM_RESTARTS = "SPECDIST_NUM_RESTARTS"
REPLICA = "SPECDIST_REPLICA"
LONE_ROW = "SPECDIST_LONE_ROW"
FIRST_OWN_DESCRIPTOR = 3

logger = logging.getLogger(__name__)


def num_restarts() -> int:
    """Of this replica, for lack of memory each."""
    return int(os.environ.get(NUM_RESTARTS, "0"))


def former_replica() -> str | None:
    """The name that this replica had before it started over."""
    return os.environ.get(REPLICA) if num_restarts() else None


def remember_replica(name: str) -> None:
    """What it will be called if it starts over."""
    os.environ[REPLICA] = name


def remember_lone_row(row: tuple[int, int] | None) -> None:
    """A row and its sample that run alone, and cannot be given less; None where a batch can be smaller."""
    if row is None:
        os.environ.pop(LONE_ROW, None)
    else:
        os.environ[LONE_ROW] = f"{row[0]} {row[1]}"


def former_lone_row() -> tuple[int, int] | None:
    """What was remembered when this replica started over."""
    words = os.environ.get(LONE_ROW, "").split()
    return (int(words[0]), int(words[1])) if num_restarts() and words else None


def start_over() -> None:
    """Replace this program by itself, from any thread. Returns only if that cannot be done (OSError)."""
    os.environ[NUM_RESTARTS] = str(num_restarts() + 1)
    logger.warning("starting over with half the batch")
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' connections would stay open, and the other ranks wait for them to close.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) >= FIRST_OWN_DESCRIPTOR:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(path.name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
