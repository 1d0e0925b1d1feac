"""A job in a process of its own; all its output, up to the end of the interpreter, goes to a file."""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specdist.cli import generate
from tests.forked import fork
from tests.job.gate import Gate, install
from tests.job.launching import Main, job_arguments


def fork_telling(
    told: Path, *, main: Main = generate, gate: Gate | None = None, **options: Any
) -> BaseProcess:
    """Start the job."""
    # Those of the process that all are forked from may be other ones.
    environment, folder = dict(os.environ), None if gate is None else gate.folder
    words = job_arguments(main, options)
    process = fork(_run, main, words, told, environment, folder)
    process.start()
    return process


def _run(main: Main, words: list[str], told: Path, environment: dict[str, str], gate: Path | None) -> None:
    os.environ.update(environment)
    if gate is not None:
        install(gate)
    with told.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(words))
