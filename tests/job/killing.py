"""Jobs that are killed at a chosen moment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specdist.cli import generate
from tests.forked import fork
from tests.job.gate import Gate, gated
from tests.job.launching import TIMEOUT_S, Main, job_arguments

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


def fork_quietly(main: Main = generate, gate: Gate | None = None, **options: Any) -> BaseProcess:
    """Start the job in a process of its own, without output."""
    process = fork(_run_quietly, job_arguments(main, options), main, None if gate is None else gate.folder)
    process.start()
    return process


def fork_and_kill(
    moment: Callable[[], bool], main: Main = generate, gate: Gate | None = None, **options: Any
) -> int | None:
    """Run the job in a process of its own, SIGKILL it when the moment comes; its exit code. ``gate``: rows
    wait until the test has looked whether the moment has come."""
    process = fork_quietly(main, gate, **options)
    try:
        (wait_until if gate is None else gate.let_through)(moment, process.is_alive)
    finally:
        process.kill()
        process.join()
    return process.exitcode


def _run_quietly(arguments: list[str], main: Main, gate: Path | None) -> None:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        sys.stdout = sys.stderr = nowhere
        sys.exit(main(arguments) if gate is None else gated(gate, main, arguments))
