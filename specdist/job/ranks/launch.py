"""Ranks that are forked; and ``accelerate launch`` that ends with the exit code of its ranks: ``python -m
specdist.job.ranks.launch ...``.

accelerate itself ends with 1, whatever they end with. A scheduler must tell a request to stop, after which
the same command goes on, from a wrong option, after which it will not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from specdist.job.ranks.signals import EXIT_STOPPED, GRACE_S, LAUNCHER_VARIABLES, STOP_SIGNALS
from specdist.utils.errors import USAGE_ERROR, UserError
from specdist.utils.garbage import paused_garbage
from specdist.utils.host import process_start_s
from specdist.utils.packages import named_packages


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the arguments of ``accelerate launch``.

    Returns the exit code of the rank that ended first with another one than 0, 128 and the signal's number
    where one was killed, and ``EXIT_STOPPED`` if the launcher itself was asked to stop.
    """
    try:
        with named_packages("a launch of several ranks"):
            from accelerate.commands.launch import launch_command, launch_command_parser
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_ERROR
    options = launch_command_parser().parse_args(arguments)
    try:
        launch_command(options)
    except ChildFailedError as error:
        return _as_shells_do(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:
        return _as_shells_do(error.returncode)
    except SignalException:
        return EXIT_STOPPED
    return 0


def fork_ranks(num_ranks: int) -> int | None:
    """Fork the ranks of a sharded target on CPUs, which have all that this process has imported, and wait
    for them. Returns None in every rank, and in this process the exit code, as :func:`main` does."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", LAUNCHER_VARIABLES[0]: "fork"}
    os.environ["DS_ACCELERATOR"] = "cpu"
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun has it
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    with contextlib.suppress(ImportError), paused_garbage():  # a rank says what is missing
        import specdist.models.sharding.tp_layers  # noqa: F401
    process_start_s()  # theirs, too
    ranks: set[int] = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            os.setsid()  # Ctrl-C in a terminal is the launcher's to pass on
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return None
        ranks.add(pid)

    def pass_on(number: int, *_: object) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if number == signal.SIGALRM else number)

    for number in (*STOP_SIGNALS, signal.SIGALRM):
        signal.signal(number, pass_on)
    first = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if code := os.waitstatus_to_exitcode(status):
            first = first or code
            pass_on(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    return _as_shells_do(first)


def _as_shells_do(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
