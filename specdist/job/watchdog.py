"""No rank waits for one that is gone: every rank watches the others, and all of them say who has failed.

A failure is written once, into the launcher's key-value store, by whoever sees it first: the rank itself,
which knows why, or one that finds it dead. Ranks that only notice that a connection has broken look there for
the reason. The store is asked from a thread, since the main thread may be deep in a library that waits.

What is watched: that the other ranks' processes are there (of those on the same machine); that their own
watchdogs count on, which a stopped process does not; and on the lead that rounds go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from specdist.data.heartbeat import Process
from specdist.engine.faults import first_line, is_out_of_memory
from specdist.errors import UserError
from specdist.job.restart import num_restarts
from specdist.job.topology import Topology, launcher_store

POLL_S = 0.5
# How long a rank whose connection has broken waits for the reason: others need two polls to find a dead one.
PATIENCE_S = 4.0
# How long the main thread may take to give its shards back when it is told that the replica has failed.
LEAVE_S = 5.0
# How long the rank with the store stays, for the others to find the reason there.
LINGER_S = 3 * POLL_S
STACKS_SIGNAL = signal.SIGUSR2
STORE_TIMEOUT = timedelta(seconds=5)
# Of a broken connection: not the reason but its effect.
CONNECTION_WORDS = ("gloo", "NCCL", "onnection")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a replica ends. ``usage``: an error for the user to read; ``memory``: with a smaller batch it would
    go on; ``silent``: the rank's process is there, and does nothing."""

    kind: Literal["error", "usage", "memory", "gone", "silent", "stalled"]
    rank: int
    role: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.role}): {self.reason}"


@dataclass
class _Peer:
    rank: int
    process: Process | None = None
    num_beats: int = -1
    since: float = 0.0


class Watchdog:
    """Of one rank of several. To be closed before the ranks part."""

    def __init__(
        self,
        topology: Topology,
        store: dist.Store,
        *,
        timeout_s: float,
        num_looks: Callable[[], int],
        end: Callable[[Failure], None],
        can_start_over: Callable[[], bool],
    ) -> None:
        """
        Args:
            timeout_s: so long a rank may be silent, and a round may take.
            num_looks: grows with every round of this rank; 0 before the first.
            can_start_over: whether a lack of memory, now, is a reason to go on with a smaller batch.
            end: ends the process, if the main thread has not done so in time.
        """
        self._topology = topology
        self._store = store
        self._timeout_s = timeout_s
        self._num_looks = num_looks
        self._end = end
        self._can_start_over = can_start_over
        self._peers = [_Peer(rank) for rank in range(topology.world_size) if rank != topology.rank]
        self._looks = 0, 0.0
        self._failure: Failure | None = None
        # Without a launcher that has a store of its own it ends with the lead.
        self._hosts_store = topology.is_lead and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._is_closed = threading.Event()
        store.set(f"process/{topology.rank}", json.dumps(dataclasses.asdict(Process.current())))
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From here on the other ranks may leave."""
        self._is_closed.set()

    def explain(self, error: BaseException) -> Failure:
        """Why the replica has failed, of which this rank's error may be but an effect; told to the others."""
        self.close()
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
                if (failure := self._known() or self._dead_peer()) is not None:
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
        # The store may have gone with the launcher; processes are seen without it.
        with contextlib.suppress(RuntimeError):
            self._store.add(f"beats/{self._topology.rank}", 1)
        return self._known() or self._dead_peer() or self._silent_peer() or self._stall()

    def _known(self) -> Failure | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check(["failure"]):
                return Failure(**json.loads(self._store.get("failure")))
        return None

    def _dead_peer(self) -> Failure | None:
        for peer in self._peers:
            if peer.process is None:
                peer.process = self._process_of(peer.rank)
            if peer.process is not None and peer.process.is_alive() is False:
                # It may have had the time to say why.
                time.sleep(POLL_S / 5)
                return self._known() or self._report(
                    "gone", peer.rank, f"{peer.process} is gone without a word: killed, or crashed"
                )
        return None

    def _process_of(self, rank: int) -> Process | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"process/{rank}"]):
                return Process(**json.loads(self._store.get(f"process/{rank}")))
        return None

    def _silent_peer(self) -> Failure | None:
        now = time.monotonic()
        for peer in self._peers:
            try:
                num_beats = self._store.add(f"beats/{peer.rank}", 0)
            except RuntimeError:
                return None
            if num_beats != peer.num_beats:
                peer.num_beats, peer.since = num_beats, now
            elif now - peer.since > self._timeout_s:
                reason = f"{peer.process} has been silent for {self._timeout_s:.0f} s: stopped, or it hangs"
                return self._report("silent", peer.rank, reason)
        return None

    def _stall(self) -> Failure | None:
        num_looks, now = self._num_looks(), time.monotonic()
        if num_looks != self._looks[0] or not num_looks:
            self._looks = num_looks, now
        elif now - self._looks[1] > self._timeout_s:
            reason = (
                f"no round has ended for {self._timeout_s:.0f} s (--rank_timeout), though all ranks' "
                "processes are there: the log of each rank shows where it is"
            )
            return self._report("stalled", self._topology.rank, reason)
        return None

    def _report(self, kind: str, rank: int, reason: str) -> Failure:
        """The first failure counts; the one that does is the answer."""
        failure = Failure(kind, rank, self._topology.role_of(rank), reason)  # type: ignore[arg-type]
        with contextlib.suppress(RuntimeError):
            told = self._store.compare_set("failure", "", json.dumps(dataclasses.asdict(failure)))
            return Failure(**json.loads(told))
        return failure

    def _react(self, failure: Failure) -> None:
        self._failure = failure
        if failure.kind != "usage":
            logger.error("this replica ends: %s", failure)
        if failure.kind == "stalled":
            os.kill(os.getpid(), STACKS_SIGNAL)
        if failure.kind == "silent":
            self._kill(failure.rank)
        # A broken connection wakes the main thread, which then gives the shards back and ends.
        if not self._is_closed.wait(LEAVE_S):
            self._end(failure)

    def _kill(self, rank: int) -> None:
        """A process that hangs would keep its GPU, and the launcher waiting. First it may say where it is."""
        for peer in self._peers:
            if peer.rank == rank and peer.process is not None and peer.process.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(peer.process.pid, STACKS_SIGNAL)
                    time.sleep(POLL_S)
                    os.kill(peer.process.pid, signal.SIGKILL)


def watch_over(
    topology: Topology,
    *,
    timeout_s: float,
    num_looks: Callable[[], int],
    end: Callable[[Failure], None],
    can_start_over: Callable[[], bool],
) -> Watchdog | None:
    """The watchdog of a rank that the launcher has started; None for one that is alone."""
    if topology.world_size == 1:
        return None
    return Watchdog(
        topology,
        # On the process group's own connection the main thread may wait.
        dist.PrefixStore(f"watchdog/{num_restarts()}", launcher_store(STORE_TIMEOUT)),
        timeout_s=timeout_s,
        num_looks=num_looks,
        end=end,
        can_start_over=can_start_over,
    )


def dump_stacks_on_request(log_path: str) -> None:
    """Where every thread of this process is, into its log, whenever it gets ``STACKS_SIGNAL``: also while a
    library holds the interpreter."""
    log = open(log_path, "a")  # noqa: PTH123, SIM115 (as long as the process)
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)
