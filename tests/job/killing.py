"""Jobs that are killed at a chosen moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdist.cli import generate
from tests.job.gate import Gate
from tests.job.launching import TIMEOUT_S, Main
from tests.job.telling import fork_telling

POLL_S = 0.001
# Two rows at a time: a gate lets them through one by one, so that they are hit at a chosen moment.
SLOW: dict[str, Any] = {
    "rows_per_shard": 6,
    "max_num_seqs": 2,
    "max_new_tokens": 30,
    "temperature": 1,
    "top_p": 0.9,
}


def wait_until(reached: Callable[[], bool], is_running: Callable[[], bool] = lambda: True) -> None:
    """Wait until the moment comes, or the job ends by itself."""
    deadline = time.monotonic() + TIMEOUT_S
    while not reached() and is_running():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(POLL_S)


def fork_and_kill(
    moment: Callable[[], bool], main: Main = generate, gate: Gate | None = None, **options: Any
) -> int | None:
    """Run the job in a process of its own, SIGKILL it when the moment comes; its exit code. ``gate``: rows
    wait until the test has looked whether the moment has come."""
    process = fork_telling(Path(os.devnull), main=main, gate=gate, **options)
    try:
        (wait_until if gate is None else gate.let_through)(moment, process.is_alive)
    finally:
        process.kill()
        process.join()
    return process.exitcode
