"""Ranks with fake GPUs that report how they leave, or that fail on the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from specdist.job.ranks.watchdog import Watchdog
from specdist.models.passes.runner import ModelRunner
from specdist.utils.errors import UserError
from tests.gpu import process_groups
from tests.gpu.generating import main
from tests.gpu.process_groups import recordings_with_collectives
from tests.gpu.recording import Recording

REPLAYS = "a graph with collectives is replayed"
DESTROYS = "a communicator is destroyed"
REPLAYED, LEFT = "graphs with collectives, replayed and left at the end: ", " and "
FAULT, KIND = "a fault of this test", "ENDING_KIND"
# By then the passes of every rank are recorded.
FAILING_PASS = 12


def reporting(given: Sequence[str]) -> int:
    """The job. Each rank says when it first replays a graph with collectives; when it leaves, how many it
    replayed and still has; and when it destroys a communicator."""
    replay, leave, replayed = Recording.replay, Watchdog.leave, set()
    destroy = process_groups.destroy_process_group

    def noted(recording: Recording) -> None:
        if recording in recordings_with_collectives():
            if not replayed:
                sys.stderr.write(f"{REPLAYS}\n")
                sys.stderr.flush()
            replayed.add(id(recording))
        replay(recording)

    def reports(watchdog: Watchdog) -> None:
        left = len(recordings_with_collectives())
        sys.stderr.write(f"{REPLAYED}{len(replayed)}{LEFT}{left}\n")
        leave(watchdog)

    def destroys(group: Any = None) -> None:
        sys.stderr.write(f"{DESTROYS}\n")
        destroy(group)

    process_groups.destroy_process_group = destroys
    Recording.replay = noted  # type: ignore[method-assign]
    Watchdog.leave = reports  # type: ignore[method-assign]
    return main(given)


def failing(given: Sequence[str]) -> int:
    """The job, of which rank 0 fails while the others wait for it in a collective."""
    forward, passes = ModelRunner.forward, [0]

    def fails(runner: ModelRunner, *args: Any) -> Any:
        passes[0] += 1
        if passes[0] == FAILING_PASS and dist.get_rank() == 0:
            raise (UserError if os.environ[KIND] == "usage" else RuntimeError)(FAULT)
        return forward(runner, *args)

    ModelRunner.forward = fails  # type: ignore[method-assign]
    return main(given)


def on_another_gpu(given: Sequence[str]) -> int:
    """The job in one process, whose GPU is not the first of the node."""
    os.environ["LOCAL_RANK"] = "3"
    return main(given)
