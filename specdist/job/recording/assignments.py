"""What the ranks of a replica do next, decided by rank 0: work, wait for other replicas, or end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import Enum

from specdist.job.ranks.signals import StopRequest
from specdist.job.ranks.topology import Topology, broadcast_from_rank0
from specdist.job.recording.recording import Recorder
from specdist.job.replica.replica import Replica

logger = logging.getLogger(__name__)


class Assignment(Enum):
    """``WAIT``: other replicas hold all unfinished shards, and one of them may end before its shard does.
    ``COSTS``: rounds are decided by others from now on."""

    WORK = "work"
    COSTS = "costs"
    WAIT = "wait"
    COMPLETE = "complete"
    STOPPED = "stopped"

    @property
    def is_last(self) -> bool:
        return self in (Assignment.COMPLETE, Assignment.STOPPED)


def assign_from_rank0(topology: Topology, recorder: Recorder, stop: StopRequest) -> Iterator[Assignment]:
    """Rank 0's assignments, each broadcast to the other ranks; the last one says how the work ended."""
    previous: Assignment | None = None
    while True:
        assignment = broadcast_from_rank0(topology, _next_assignment(recorder, stop))
        yield assignment
        if assignment.is_last:
            return
        if assignment is Assignment.WAIT:
            if previous is not Assignment.WAIT:
                logger.info(
                    "finished shards are on their way to the store: waiting for them"
                    if recorder.num_uploads
                    else "other replicas hold all remaining shards: waiting until these are completed"
                )
            time.sleep(recorder.poll_s)
        previous = assignment


def follow_assignments(topology: Topology, replica: Replica, stop: StopRequest) -> bool:
    """The work of all ranks except rank 0. Returns whether the run is complete."""
    stop.defer_signals()
    assignment = Assignment.WAIT
    while not assignment.is_last:
        assignment = broadcast_from_rank0(topology, assignment)
        if assignment is Assignment.WORK:
            replica.serve()
        elif assignment is Assignment.COSTS:
            replica.use_costs()
    return assignment is Assignment.COMPLETE


def _next_assignment(recorder: Recorder, stop: StopRequest) -> Assignment:
    recorder.settle()
    # Checked first: a request to stop changes nothing when there is nothing left to do.
    if recorder.is_run_complete:
        return Assignment.COMPLETE
    if stop.is_made:
        return Assignment.STOPPED
    if recorder.lease() or recorder.waits_for_answers:
        return Assignment.COSTS if recorder.waits_for_costs else Assignment.WORK
    return Assignment.COMPLETE if recorder.is_run_complete else Assignment.WAIT
