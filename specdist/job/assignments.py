"""What the ranks of a replica do next, as its rank 0 decides: work, wait for other replicas, or leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import Enum

from specdist.job.preflight import RunPlan
from specdist.job.recording import Recorder
from specdist.job.replica import Replica
from specdist.job.signals import StopRequest
from specdist.job.topology import Topology, broadcast_from_rank0

logger = logging.getLogger(__name__)


class Assignment(Enum):
    """``WAIT``: all shards that are left are other replicas', one of which may end before its shard does."""

    WORK = "work"
    WAIT = "wait"
    COMPLETE = "complete"
    STOPPED = "stopped"

    @property
    def is_last(self) -> bool:
        return self in (Assignment.COMPLETE, Assignment.STOPPED)


def assign_from_rank0(
    topology: Topology, run: RunPlan, recorder: Recorder, stop: StopRequest
) -> Iterator[Assignment]:
    """Rank 0's turns, each of which the other ranks are told of; the last one says how it ended."""
    is_waiting = False
    while True:
        assignment = broadcast_from_rank0(topology, _next_assignment(recorder, stop))
        yield assignment
        if assignment.is_last:
            return
        if assignment is Assignment.WAIT:
            if not is_waiting:
                logger.info(
                    "all remaining shards are held by other replicas: waiting for them to be completed"
                )
            time.sleep(run.membership.poll_s)
        is_waiting = assignment is Assignment.WAIT


def follow_assignments(topology: Topology, replica: Replica, stop: StopRequest) -> bool:
    """What every rank but rank 0 does; returns whether the run is complete."""
    stop.defer_signals()
    assignment = Assignment.WAIT
    while not assignment.is_last:
        assignment = broadcast_from_rank0(topology, assignment)
        if assignment is Assignment.WORK:
            replica.serve()
    return assignment is Assignment.COMPLETE


def _next_assignment(recorder: Recorder, stop: StopRequest) -> Assignment:
    # Looked at first: with nothing left to do, being asked to stop changes nothing.
    if recorder.is_run_complete:
        return Assignment.COMPLETE
    if stop.is_made:
        return Assignment.STOPPED
    if recorder.claim():
        return Assignment.WORK
    return Assignment.COMPLETE if recorder.is_run_complete else Assignment.WAIT
