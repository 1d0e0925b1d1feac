"""Jobs of three ranks that hang in one way each, most without a model. Called in the ranks."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from specdist.cli import generate
from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.job.ranks import entry, watchdog
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.signals import StopRequest
from specdist.job.ranks.topology import Topology
from specdist.models.loading import loading

STEP_S, NUM_STEPS = 0.5, 15
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
    """While it loads; the others wait for it in a collective."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 2:
            activity.begin("loading the draft")
            hang()
        activity.begin("waiting until every rank has loaded")
        dist.barrier()

    return run(work, arguments)


def one_is_slow(arguments: Sequence[str]) -> int:
    """It takes longer than a rank may hang, in many steps; the others wait for it."""

    def work(topology: Topology, activity: Activity) -> None:
        if topology.rank == 1:
            for _ in range(NUM_STEPS):
                time.sleep(STEP_S)
                activity.step()
        dist.barrier()

    return run(work, arguments)


def one_cannot_read(arguments: Sequence[str]) -> int:
    """The main job; the storage of its second rank stops answering after a few tensors of the target."""
    take, num_taken = loading.Filling.take, itertools.count()

    def take_or_hang(*read: Any) -> Any:
        if next(num_taken) == 3:
            hang()
        return take(*read)

    if os.environ["RANK"] == "1":
        loading.Filling.take = take_or_hang  # type: ignore[method-assign]
    return generate(arguments)


def one_never_comes(arguments: Sequence[str]) -> int:
    """It hangs before it has met the others."""
    if os.environ["RANK"] == "1":
        hang()
    return run(lambda topology, activity: None, arguments)


def the_first_never_comes(arguments: Sequence[str]) -> int:
    """The rank with the store at which the others meet."""
    if os.environ["RANK"] == "0":
        hang()
    return run(lambda topology, activity: None, arguments)


def one_does_not_leave(arguments: Sequence[str]) -> int:
    """The others are at the last barrier."""

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
        activity.begin("loading the target")
        if topology.rank == 1:
            hold_the_interpreter()
        dist.barrier()

    return run(work, arguments)


def all_hold_their_interpreters(arguments: Sequence[str]) -> int:
    """No thread of any rank can run."""
    watchdog.HELD_MARGIN_S = 1.0
    return run(lambda topology, activity: hold_the_interpreter(), arguments)
