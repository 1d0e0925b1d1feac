"""What the ranks of a replica do next, as its lead decides: work, wait for other replicas, or leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import Enum

from specdist.job.preflight import RunPlan
from specdist.job.recording import Recorder
from specdist.job.replica import Replica
from specdist.job.signals import StopRequest
from specdist.job.topology import Topology, told_by_lead

logger = logging.getLogger(__name__)


class Turn(Enum):
    """``WAIT``: all shards that are left are other replicas', one of which may end before its shard does."""

    WORK = "work"
    WAIT = "wait"
    COMPLETE = "complete"
    STOPPED = "stopped"

    @property
    def is_last(self) -> bool:
        return self in (Turn.COMPLETE, Turn.STOPPED)


def lead_turns(topology: Topology, run: RunPlan, recorder: Recorder, stop: StopRequest) -> Iterator[Turn]:
    """The lead's turns, each of which the other ranks are told of; the last one says how it ended."""
    is_waiting = False
    while True:
        turn = told_by_lead(topology, _next_turn(recorder, stop))
        yield turn
        if turn.is_last:
            return
        if turn is Turn.WAIT:
            if not is_waiting:
                logger.info("every shard that is left is another replica's: waiting for them to be complete")
            time.sleep(run.membership.poll_s)
        is_waiting = turn is Turn.WAIT


def follow_turns(topology: Topology, replica: Replica, stop: StopRequest) -> bool:
    """What every rank but the lead does; returns whether the run is complete."""
    stop.become_gentle()
    turn = Turn.WAIT
    while not turn.is_last:
        turn = told_by_lead(topology, turn)
        if turn is Turn.WORK:
            replica.serve()
    return turn is Turn.COMPLETE


def _next_turn(recorder: Recorder, stop: StopRequest) -> Turn:
    # Looked at first: with nothing left to do, being asked to stop changes nothing.
    if recorder.is_run_complete:
        return Turn.COMPLETE
    if stop.is_made:
        return Turn.STOPPED
    if recorder.claim():
        return Turn.WORK
    return Turn.COMPLETE if recorder.is_run_complete else Turn.WAIT
