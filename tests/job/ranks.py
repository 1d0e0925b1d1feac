"""The ranks of a job without their launcher, which has tests of its own, and without every rank's imports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from specdist.cli.generate import main as generate
from tests.forked import World, started_world
from tests.job.launching import TIMEOUT_S, Ended, Main, job_arguments


@contextlib.contextmanager
def started_ranks(num_ranks: int, main: Main = generate, **options: Any) -> Iterator[World]:
    """The job as so many ranks; ranks still alive at the end of the block are killed."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started_world(num_ranks, main, job_arguments(main, options), environment=environment) as world:
        yield world


def fork_ranks(num_ranks: int, main: Main = generate, **options: Any) -> Ended:
    """The job as so many ranks, to its end."""
    with started_ranks(num_ranks, main, **options) as world:
        code = world.end(TIMEOUT_S)
        return Ended(code, "".join(world.words("stdout")), "".join(world.words("stderr")))


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
