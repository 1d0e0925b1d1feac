"""The process that has launched this rank: when it is gone, the rank has nothing left to live for.

Nobody waits for such a rank any more, no signal reaches it, and a relaunch would put a second copy of the
models beside it. So it asks twice a second who its parent is. The kernel's own signal at a parent's death
(PR_SET_PDEATHSIG) is not used: it comes when the parent's *thread* ends, and a launcher may start processes
from any thread; and it cannot be told from a signal that somebody sends.
"""

from __future__ import annotations

import os

# torchrun, and accelerate for several processes; accelerate for one.
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


def find_launcher() -> int | None:
    """The process id of the launcher, this process's parent; None for a process that was started by hand,
    which may outlive the shell that it was started from."""
    return os.getppid() if any(name in os.environ for name in LAUNCHER_VARIABLES) else None


def is_gone(launcher: int) -> bool:
    """A process whose parent has ended gets another one."""
    return os.getppid() != launcher
