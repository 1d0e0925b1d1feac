"""Every rank watches the others: none waits for a rank that has failed, and all report the same failure.

The first failure counts. It is written into the launcher's key-value store by the failing rank, which knows
the reason, or by a rank that finds it dead. A rank that only sees a broken connection looks there for the
reason. A thread does this, since the main thread may be waiting inside a library.

From before the ranks meet until the last one leaves, the watchdogs check that all ranks arrive; that their
processes exist (on the same machine); that their watchdogs keep counting, which a stopped process does not;
and that some rank makes progress (:class:`specdist.job.ranks.activity.Activity`). A rank may wait for another
rank that works.
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

from specdist.data.leases.heartbeat import Process
from specdist.job.ranks.activity import STACKS_SIGNAL, Activity, StackLog
from specdist.job.ranks.rank_store import Failure, RankState, RankStore
from specdist.job.ranks.restart import is_out_of_memory
from specdist.job.ranks.topology import LONGEST_TIMEOUT_S, Topology, hosts_store, meeting_store
from specdist.utils.errors import DISK_FULL, UserError, first_line

POLL_S = 0.5
# How long a rank with a broken connection waits for the reason: others need two polls to find a dead rank.
PATIENCE_S = 4.0
# How long the main thread may take to release its shards after a failure.
LEAVE_S = 5.0
# How long the rank that hosts the store stays, so that the others can read the reason.
LINGER_S = 3 * POLL_S
# A watchdog that has not run for so long was stopped, and perhaps all processes were.
PAUSE_S = 5.0
# A rank whose interpreter's lock is held ends itself so much later than the others would end it.
HELD_MARGIN_S = 15.0
STORE_TIMEOUT = timedelta(seconds=5)
# What errors of a broken connection say, which is an effect and not the reason.
CONNECTION_WORDS = ("gloo", "NCCL", "onnection")

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    """Another rank. ``state``: its latest state; None until it has arrived."""

    rank: int
    state: RankState | None = None
    beaten_at: float = 0.0


class Watchdog:
    """The watchdog of one rank of several, from before they meet until they part."""

    def __init__(
        self,
        topology: Topology,
        activity: Activity,
        stacks: StackLog,
        *,
        end: Callable[[Failure], None],
        can_start_over: Callable[[], bool],
    ) -> None:
        """
        Args:
            activity: this rank's.
            end: ends the process, if the main thread has not done so in time.
            can_start_over: whether, if memory runs out now, the replica starts over with a smaller batch.

        Raises RuntimeError if the launcher's store cannot be reached.
        """
        self._topology = topology
        # Not the process group's connection, on which the main thread may wait.
        store = meeting_store(topology, "watchdog")
        store.set_timeout(STORE_TIMEOUT)
        self._store = RankStore(store)
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
        # Where the launcher has no store, the store ends with rank 0.
        self._hosts_store = hosts_store(topology)
        self._is_closed = threading.Event()
        self._set_timer()
        self._tell()
        activity.on_phase = self._tell
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell the other ranks that this one is done and its process may end. Until :meth:`close` it must
        still end in time."""
        self._has_left = True
        self._tell()
        deadline = time.monotonic() + LEAVE_S
        while self._hosts_store and time.monotonic() < deadline and not self._have_all_left():
            time.sleep(POLL_S / 5)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()
        self._activity.on_phase = None
        self._stacks.close()

    def explain(self, error: BaseException) -> Failure:
        """The replica's failure, of which this rank's error may be only an effect; the others get it, too.

        Stops watching, but the process is ended if it does not end by itself.
        """
        self._is_closed.set()
        failure = self._failure or self._explained(error)
        if self._hosts_store:
            time.sleep(LINGER_S)
        return failure

    def _explained(self, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            kind = "disk" if error.exit_code == DISK_FULL else "usage"
            return self._report(kind, self._topology.rank, str(error))
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
        # Without the store, as after the launcher's end, only processes can be checked.
        if failure is not None or not all(self._ask(peer) for peer in self._watched()):
            return failure
        return self._missing_peers(now) or self._silent_peer(now) or self._stall(now)

    def _set_timer(self) -> None:
        """Set a timer for the case that a library holds the interpreter's lock, so that no thread runs."""
        self._stacks.expect_a_call(min(self._timeout_s, LONGEST_TIMEOUT_S) + HELD_MARGIN_S)

    def _forgive_a_pause(self, now: float) -> None:
        """Do not count a pause of all processes, as of a suspended job, against any rank."""
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
        """Read the peer's latest state; False if the store does not answer."""
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
                # It may have written its failure, or that it has left.
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
        """Whether no rank takes steps any more. Ranks that have left still count, with their last steps."""
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
        """Report a failure; returns the one that counts, which may be an earlier one."""
        failure = Failure(kind, rank, self._topology.role_of(rank), reason)  # type: ignore[arg-type]
        return self._store.report(failure)

    def _react(self, failure: Failure) -> None:
        self._failure = failure
        if failure.kind not in ("usage", "disk"):
            logger.error("this replica ends: %s", failure)
        if failure.kind in ("missing", "silent", "stalled"):
            self._stacks.write()
        if failure.kind == "silent":
            self._kill(failure.rank)
        # A broken connection wakes the main thread, which then releases its shards and ends.
        if not self._is_closed.wait(LEAVE_S):
            self._end(failure)

    def _kill(self, rank: int) -> None:
        """End a process that hangs, which would keep its GPU and the launcher waiting; first it writes its
        stack traces."""
        for peer in self._peers:
            if peer.rank == rank and peer.state is not None and peer.state.process.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(peer.state.process.pid, STACKS_SIGNAL)
                    time.sleep(POLL_S)
                    os.kill(peer.state.process.pid, signal.SIGKILL)
