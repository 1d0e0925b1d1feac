"""The ranks of a job without their launcher, which has tests of its own, and without every rank's imports."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any

from specdist.cli import generate
from tests.forked import World, started_world
from tests.job.gate import Gate, gated
from tests.job.launching import TIMEOUT_S, Ended, Main, job_arguments

PORTS = range(10_000, 20_000)


@contextlib.contextmanager
def started_ranks(
    num_ranks: int, main: Main = generate, gate: Gate | None = None, **options: Any
) -> Iterator[World]:
    """The job as so many ranks; ranks still alive at the end of the block are killed."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = job_arguments(main, options)
    target = (main, arguments) if gate is None else (gated, gate.folder, main, arguments)
    with started_world(num_ranks, *target, environment=environment) as world:
        yield world


def fork_ranks(num_ranks: int, main: Main = generate, **options: Any) -> Ended:
    """The job as so many ranks, to its end."""
    with started_ranks(num_ranks, main, **options) as world:
        code = world.end(TIMEOUT_S)
        return Ended(code, "".join(world.words("stdout")), "".join(world.words("stderr")))


def free_port() -> int:
    """A port on which nothing listens now, of those that the system gives to nobody by itself: it stays free
    until the ranks need it."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
