"""No rank waits for one that is gone: every rank watches the others, and all of them say who has failed.

A failure is written once, into the launcher's key-value store, by whoever sees it first: the rank itself,
which knows why, or one that finds it dead. Ranks that only notice that a connection has broken look there for
the reason. The store is asked from a thread, since the main thread may be deep in a library that waits.

What is watched, from before the ranks meet until the last one leaves: that all ranks come; that their
processes are there (of those on the same machine); that their own watchdogs count on, which a stopped process
does not; and that some rank gets on, see :class:`specdist.job.activity.Activity`. A rank that waits for
another one that works is not at fault.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from specdist.data.heartbeat import Process
from specdist.engine.faults import first_line, is_out_of_memory
from specdist.job.activity import STACKS_SIGNAL, Activity, StackLog
from specdist.job.rank_store import Failure, RankState, RankStore
from specdist.job.topology import LONGEST_TIMEOUT_S, Topology, hosts_store, meeting_store
from specdist.utils.errors import UserError

POLL_S = 0.5
# How long a rank whose connection has broken waits for the reason: others need two polls to find a dead one.
PATIENCE_S = 4.0
# How long the main thread may take to give its shards back when it is told that the replica has failed.
LEAVE_S = 5.0
# How long the rank with the store stays, for the others to find the reason there.
LINGER_S = 3 * POLL_S
# A watchdog that has not looked for so long was stopped, and the others may have been, too.
PAUSE_S = 5.0
# A rank whose interpreter is held ends itself so much later than the others would end it.
HELD_MARGIN_S = 15.0
STORE_TIMEOUT = timedelta(seconds=5)
# Of a broken connection: not the reason but its effect.
CONNECTION_WORDS = ("gloo", "NCCL", "onnection")

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    """Another rank, as it is known here. ``state``: None until it has come."""

    rank: int
    state: RankState | None = None
    beaten_at: float = 0.0


class Watchdog:
    """Of one rank of several, from before they meet until they part."""

    def __init__(
        self,
        topology: Topology,
        store: RankStore,
        activity: Activity,
        stacks: StackLog,
        *,
        end: Callable[[Failure], None],
        can_start_over: Callable[[], bool],
    ) -> None:
        """
        Args:
            activity: of this rank.
            can_start_over: whether a lack of memory, now, is a reason to go on with a smaller batch.
            end: ends the process, if the main thread has not done so in time.
        """
        self._topology = topology
        self._store = store
        self._activity = activity
        self._stacks = stacks
        self._timeout_s = topology.rank_timeout_s
        self._end = end
        self._can_start_over = can_start_over
        self._peers = [_Peer(rank) for rank in range(topology.world_size) if rank != topology.rank]
        self._process = Process.current()
        self._num_beats = 0
        self._has_left = False
        self._telling = threading.Lock()
        self._began_at = self._looked_at = self._moved_at = time.monotonic()
        self._num_steps = 0
        self._failure: Failure | None = None
        # Without a launcher that has a store of its own it ends with rank 0.
        self._hosts_store = hosts_store(topology)
        self._is_closed = threading.Event()
        self._set_timer()
        self._tell()
        activity.on_phase = self._tell
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """This rank has nothing more to do with the others: its process may end. Until :meth:`close` its own
        end is watched."""
        self._has_left = True
        self._tell()
        deadline = time.monotonic() + LEAVE_S
        while self._hosts_store and time.monotonic() < deadline and not self._have_all_left():
            time.sleep(POLL_S / 5)

    def close(self) -> None:
        """Nothing is watched from here on."""
        self._is_closed.set()
        self._activity.on_phase = None
        self._stacks.close()

    def explain(self, error: BaseException) -> Failure:
        """Why the replica has failed, of which this rank's error may be but an effect; told to the others.

        Nothing is watched from here on, but the process ends if it does not come to its end by itself.
        """
        self._is_closed.set()
        failure = self._failure or self._explained(error)
        if self._hosts_store:
            time.sleep(LINGER_S)
        return failure

    def _explained(self, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return self._report("usage", self._topology.rank, str(error))
        if any(word in str(error) for word in CONNECTION_WORDS) and not is_out_of_memory(error):
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                if (failure := self._store.failure() or self._dead_peer()) is not None:
                    return failure
                time.sleep(POLL_S / 5)
        starts_over = is_out_of_memory(error) and self._can_start_over()
        return self._report("memory" if starts_over else "error", self._topology.rank, first_line(error))

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_S):
            failure = self._look()
            if failure is not None and not self._is_closed.is_set():
                self._react(failure)
                return

    def _look(self) -> Failure | None:
        now = time.monotonic()
        self._forgive_a_pause(now)
        self._set_timer()
        if self._has_left:
            return self._stall(now)
        self._tell()
        failure = self._store.failure() or self._dead_peer()
        # The store may have gone with the launcher; processes are seen without it.
        if failure is not None or not all(self._ask(peer) for peer in self._watched()):
            return failure
        return self._missing_peers(now) or self._silent_peer(now) or self._stall(now)

    def _set_timer(self) -> None:
        """For an interpreter that is held, in which no thread looks any more."""
        self._stacks.expect_a_call(min(self._timeout_s, LONGEST_TIMEOUT_S) + HELD_MARGIN_S)

    def _forgive_a_pause(self, now: float) -> None:
        """Of all processes, such as a suspended job: nobody has been silent for as long as this one was."""
        pause_s = now - self._looked_at - POLL_S
        self._looked_at = now
        if pause_s > PAUSE_S:
            self._began_at += pause_s
            self._moved_at += pause_s
            for peer in self._peers:
                peer.beaten_at += pause_s

    def _tell(self) -> None:
        with self._telling:
            self._num_beats += 1
            state = RankState(
                process=self._process,
                num_beats=self._num_beats,
                num_steps=self._activity.num_steps(),
                phase=self._activity.phase,
                idle_s=self._activity.idle_s,
                has_left=self._has_left,
            )
            self._store.write_state(self._topology.rank, state)

    def _ask(self, peer: _Peer) -> bool:
        """Read what the peer has told last; False if the store does not answer."""
        answers, state = self._store.read_state(peer.rank)
        if state is not None:
            if peer.state is None or state.num_beats != peer.state.num_beats:
                peer.beaten_at = time.monotonic()
            peer.state = state
        return answers

    def _watched(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.state is None or not peer.state.has_left]

    def _have_all_left(self) -> bool:
        for peer in self._watched():
            self._ask(peer)
        return not self._watched()

    def _dead_peer(self) -> Failure | None:
        for peer in self._watched():
            if peer.state is not None and peer.state.process.is_alive() is False:
                # It may have had the time to say why, or that it has come to its end.
                time.sleep(POLL_S / 5)
                self._ask(peer)
                if peer.state.has_left:
                    continue
                reason = (
                    f"{peer.state.process} has disappeared without a message (while {peer.state.phase}): "
                    "killed or crashed"
                )
                return self._store.failure() or self._report("gone", peer.rank, reason)
        return None

    def _missing_peers(self, now: float) -> Failure | None:
        missing = [peer.rank for peer in self._peers if peer.state is None]
        if not missing or now - self._began_at <= self._timeout_s:
            return None
        who = ", ".join(f"rank {rank} ({self._topology.role_of(rank)})" for rank in missing)
        reason = (
            f"{who} of {self._topology.world_size} ranks did not arrive within {self._timeout_s:.0f} s "
            "(--rank_timeout): not started, ended immediately, or hanging earlier, for example in an import "
            "from storage that does not respond"
        )
        return self._report("missing", missing[0], reason)

    def _silent_peer(self, now: float) -> Failure | None:
        for peer in self._watched():
            if peer.state is not None and now - peer.beaten_at > self._timeout_s:
                reason = (
                    f"{peer.state.process} has been silent for {self._timeout_s:.0f} s (--rank_timeout), "
                    f"while {peer.state.phase}: stopped or hanging"
                )
                return self._report("silent", peer.rank, reason)
        return None

    def _stall(self, now: float) -> Failure | None:
        """Steps of peers that have left count on; whether all have come is another question."""
        states = {peer.rank: peer.state for peer in self._peers if peer.state is not None}
        num_steps = self._activity.num_steps() + sum(state.num_steps for state in states.values())
        if num_steps != self._num_steps:
            self._num_steps, self._moved_at = num_steps, now
        if now - self._moved_at <= self._timeout_s:
            return None
        phases = {rank: (state.phase, state.idle_s) for rank, state in states.items()}
        phases[self._topology.rank] = self._activity.phase, self._activity.idle_s
        where = "; ".join(
            f"rank {rank} ({self._topology.role_of(rank)}) for {idle_s:.0f} s in: {phase}"
            for rank, (phase, idle_s) in sorted(phases.items())
        )
        reason = (
            f"no rank has made progress for {self._timeout_s:.0f} s (--rank_timeout), although all their "
            f"processes are running: {where}. The log of each rank shows its stack traces"
        )
        return self._report("stalled", self._topology.rank, reason)

    def _report(self, kind: str, rank: int, reason: str) -> Failure:
        """The failure that counts: this one, or another that was reported before."""
        failure = Failure(kind, rank, self._topology.role_of(rank), reason)  # type: ignore[arg-type]
        return self._store.report(failure)

    def _react(self, failure: Failure) -> None:
        self._failure = failure
        if failure.kind != "usage":
            logger.error("this replica ends: %s", failure)
        if failure.kind in ("missing", "silent", "stalled"):
            self._stacks.write()
        if failure.kind == "silent":
            self._kill(failure.rank)
        # A broken connection wakes the main thread, which then gives the shards back and ends.
        if not self._is_closed.wait(LEAVE_S):
            self._end(failure)

    def _kill(self, rank: int) -> None:
        """A process that hangs would keep its GPU, and the launcher waiting. First it may say where it is."""
        for peer in self._peers:
            if peer.rank == rank and peer.state is not None and peer.state.process.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(peer.state.process.pid, STACKS_SIGNAL)
                    time.sleep(POLL_S)
                    os.kill(peer.state.process.pid, signal.SIGKILL)


def watch_over(
    topology: Topology,
    activity: Activity,
    stacks: StackLog,
    *,
    end: Callable[[Failure], None],
    can_start_over: Callable[[], bool],
) -> Watchdog:
    """The watchdog of a rank that is one of several. Raises RuntimeError if the launcher is out of reach."""
    # On the process group's own connection the main thread may wait.
    store = meeting_store(topology, "watchdog")
    store.set_timeout(STORE_TIMEOUT)
    return Watchdog(topology, RankStore(store), activity, stacks, end=end, can_start_over=can_start_over)
