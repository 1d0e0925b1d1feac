"""Jobs that are killed at a chosen moment."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from specdist.job.generate import main as generate
from tests.job import forked
from tests.job.launching import TIMEOUT_S, Main, arguments

POLL_S = 0.001


def wait_until(reached: Callable[[], bool], is_running: Callable[[], bool]) -> None:
    """Until the moment comes, or the job ends by itself."""
    deadline = time.monotonic() + TIMEOUT_S
    while not reached() and is_running():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(POLL_S)


def fork_and_kill(moment: Callable[[], bool], main: Main = generate, **options: Any) -> int | None:
    """Run the job in a process of its own, SIGKILL it when the moment comes; its exit code.

    The process is forked from one that has imported the libraries: it starts in milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([forked.__name__])
    process = context.Process(target=forked.run_quietly, args=(arguments(**options), main))
    process.start()
    try:
        wait_until(moment, process.is_alive)
    finally:
        process.kill()
        process.join()
    return process.exitcode
