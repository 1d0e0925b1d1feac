"""Lets jobs in other processes go on one finished row or shard at a time, however fast they and the test are.

A job that runs freely while a test looks at its folder may be past the moment that the test waits for. Here
it stops before it logs a row, or publishes a shard, until the test has looked.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.job.launching import TIMEOUT_S, Main

POLL_S = 0.002
WAITS, PASSES, DONE, OPEN = ".waits", ".passes", ".done", "open"
FOLDER = "SPECDIST_TESTS_GATE"
# For commands: Python imports ``sitecustomize`` from here at its start.
SITE = Path(__file__).parent / "gated"


class Gate:
    """The test's side. ``folder``: a new one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """For a job that is started by its command line."""
        paths = [str(SITE), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        return {FOLDER: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def let_through(self, until: Callable[[], bool], is_running: Callable[[], bool] = lambda: True) -> None:
        """One after the other, each to its end, until the moment comes or the jobs end by themselves. The
        next ones wait."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until() and is_running():
            assert time.monotonic() < deadline, "the moment never came"
            for waiting in sorted(self.folder.glob(f"*{WAITS}")):
                if until():
                    return
                waiting.rename(waiting.with_suffix(PASSES))
                while is_running() and not waiting.with_suffix(DONE).exists():
                    assert time.monotonic() < deadline, "what was let through has not ended"
                    time.sleep(POLL_S)
            time.sleep(POLL_S)

    def open(self) -> None:
        """For all from now on."""
        (self.folder / OPEN).touch()


def install(folder: Path) -> None:
    """In the job's process, before it begins."""
    from specdist.data.run.parts import PartLog
    from specdist.data.run.run_folder import RunFolder

    numbers = itertools.count()

    def wait(place: Path) -> None:
        place.with_suffix(WAITS).touch()
        while not (place.with_suffix(PASSES).exists() or (folder / OPEN).exists()):
            time.sleep(POLL_S)

    def gated_method(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            place = folder / f"{next(numbers):05d}-{os.getpid()}"
            wait(place)
            try:
                return method(*arguments, **options)
            finally:
                place.with_suffix(DONE).touch()

        return call

    PartLog.append = gated_method(PartLog.append)  # type: ignore[method-assign]
    RunFolder.finish_shard = gated_method(RunFolder.finish_shard)  # type: ignore[method-assign]


def gated(folder: Path, main: Main, arguments: list[str]) -> int:
    """The job with the gate; for a forked process."""
    install(folder)
    return main(arguments)
