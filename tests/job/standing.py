"""Jobs of two ranks that hang in one way each, without a model. Called in the ranks."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.job.ranks import entry, watchdog
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.signals import StopRequest
from specdist.job.ranks.topology import Topology

STEP_S, NUM_STEPS = 0.3, 13
Work = Callable[[Topology, Activity], None]


def run(work: Work, arguments: Sequence[str]) -> int:
    """A rank whose work this is."""

    def at_work(config: GenerateConfig, topology: Topology, stop: StopRequest, activity: Activity) -> int:
        del config, stop
        work(topology, activity)
        return 0

    config = parse_generate_config(arguments)
    return entry.run_rank(config, config, at_work)


def hang() -> None:
    """Like a read from a server that does not answer."""
    while True:
        time.sleep(3600)


def one_hangs(arguments: Sequence[str]) -> int:
    """While it loads; the other waits for it in a collective."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 1:
            activity.begin("loading the draft")
            hang()
        activity.begin("waiting until every rank has loaded")
        dist.barrier()

    return run(work, arguments)


def one_is_slow(arguments: Sequence[str]) -> int:
    """It takes longer than a rank may hang, in many steps; the other waits for it."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 1:
            for _ in range(NUM_STEPS):
                time.sleep(STEP_S)
                activity.step()
        dist.barrier()

    return run(work, arguments)


def one_never_comes(arguments: Sequence[str]) -> int:
    """It hangs before it has met the other."""
    if os.environ["RANK"] == "1":
        hang()
    return run(lambda topology, activity: None, arguments)


def one_does_not_leave(arguments: Sequence[str]) -> int:
    """The other is at the last barrier."""

    def work(topology: Topology, activity: Activity) -> None:
        del activity
        if topology.rank == 1:
            hang()

    return run(work, arguments)


def one_hangs_at_its_end(arguments: Sequence[str]) -> int:
    """In the teardown of a library."""
    if os.environ["RANK"] == "1":
        entry.dist.destroy_process_group = hang
    return run(lambda topology, activity: None, arguments)


def hold_the_interpreter() -> None:
    """Like an extension that reads without letting other threads run."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(3600)


def one_holds_its_interpreter(arguments: Sequence[str]) -> int:
    """None of its threads can run."""

    def work(topology: Topology, activity: Activity) -> None:
        activity.begin("loading the draft")
        if topology.rank == 1:
            hold_the_interpreter()
        dist.barrier()

    return run(work, arguments)


def all_hold_their_interpreters(arguments: Sequence[str]) -> int:
    """No thread of any rank can run."""
    watchdog.HELD_MARGIN_S = 1.0
    return run(lambda topology, activity: hold_the_interpreter(), arguments)
