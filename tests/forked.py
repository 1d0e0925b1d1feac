"""Processes forked from one that has imported the libraries: they start in milliseconds, not in seconds.

Importing this module imports what ranks need; the server that processes are forked from does it once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

# DeepSpeed chooses at its first import; the job makes the same choice where torch sees no GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from specdist.utils.garbage import paused_garbage

with paused_garbage():
    import deepspeed  # noqa: F401
    import pandas as pd  # noqa: F401 (pyarrow asks for it when it is first needed)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import specdist.job.generate
    import specdist.training.collect.run  # noqa: F401


def fork(target: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """A process that will run ``target``, not started yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context.Process(target=target, args=arguments)


class World:
    """Processes that work together, rank 0 first, and their output."""

    def __init__(self, processes: list[ForkServerProcess], folder: Path) -> None:
        self.processes = processes
        self._folder = folder

    def is_running(self) -> bool:
        """Whether no rank has ended yet."""
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for process in self.processes:
            process.kill()
            process.join()

    def end(self, timeout_s: float) -> int:
        """Wait for all of them; if one fails, kill the others, as a launcher does.

        Returns the exit code of the first to fail, or 0; -1 if they do not end in time.
        """
        running = list(self.processes)
        while running:
            ready = wait([process.sentinel for process in running], timeout=timeout_s)
            codes = [process.exitcode or 0 for process in running if process.sentinel in ready]
            if failed := next(filter(None, codes or [-1]), 0):
                self.kill()
                return failed
            running = [process for process in running if process.is_alive()]
        return 0

    def words(self, stream: str) -> list[str]:
        """What each rank has written to ``stdout`` or ``stderr``."""
        return [path.read_text() for path in sorted(self._folder.glob(f"*.{stream}"))]


@contextlib.contextmanager
def started_world(
    num_ranks: int, target: Callable[..., Any], *arguments: Any, environment: dict[str, str]
) -> Iterator[World]:
    """Every rank runs ``target``; ranks still alive at the end of the block are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            fork(
                _run_rank,
                folder / f"{rank}",
                environment | {"WORLD_SIZE": str(num_ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                target,
                *arguments,
            )
            for rank in range(num_ranks)
        ]
        world = World(processes, folder)
        for process in processes:
            process.start()
        try:
            yield world
        finally:
            world.kill()


def _run_rank(words: Path, environment: dict[str, str], target: Callable[..., Any], *arguments: Any) -> None:
    """What a launcher starts: environment variables give the rank its place, and files take its output."""
    os.environ.update(environment)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        with words.with_suffix(f".{stream}").open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    code = target(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # as in jobs/generate.py
