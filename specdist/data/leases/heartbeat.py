"""Heartbeats of the replicas that work on one folder, on any number of nodes.

A replica writes a growing number into a file. Others call it gone if its process has ended, where they can
see that, or if the file has not changed for long by their own clock: times of two nodes, or of a file server,
are never compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from specdist.data.store.files import names_within, sealed, unsealed
from specdist.data.store.storage import StorePath
from specdist.utils.host import process_state
from specdist.utils.json_values import from_fields, parse_object

BEAT_SUFFIX = ".beat"
BEATS_PER_SILENCE = 12
# A heartbeat that is older than so many beats may be that of a replica that is gone.
BEATS_MISSED = 2
# Far apart looks at an unchanged file after which its writer counts as silent: where every look takes long,
# as on a slow store, none would ever be.
MAX_FAR_LOOKS = 4
# A fixed length: the file is overwritten in place, since NFS may not show a new file under an old name.
BEAT_BYTES = 1024

logger = logging.getLogger(__name__)


def now_utc() -> str:
    """The time for people to read: nothing depends on it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Process:
    """A process by its number, which is valid on one ``machine`` (empty if unknown) and used again: so
    ``started`` says when it began, in clock ticks since the machine's start."""

    host: str
    pid: int
    machine: str
    started: int

    @staticmethod
    def current() -> Process:
        pid = os.getpid()
        found = process_state(pid)
        return Process(
            host=socket.gethostname(), pid=pid, machine=_machine(), started=found[1] if found else 0
        )

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if it cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        found = process_state(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    """Boot and process namespace: containers may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


@dataclass
class Beat:
    """The content of a replica's file.

    ``silent_after_s``: how long it may stay unchanged; ``elapsed_s``: time since the models were loaded, in
    which the rows and tokens were finished; ``num_waiting``: rows that a function is to judge."""

    replica: str
    process: Process
    silent_after_s: float
    started: str = field(default_factory=now_utc)
    elapsed_s: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    count: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(sealed(asdict(self))).encode().ljust(BEAT_BYTES - 1) + b"\n"

    @staticmethod
    def from_bytes(content: bytes) -> Beat | None:
        """Read a beat; None for invalid content, such as a beat read while it was being written. Fields that
        are unknown are those of another version."""
        try:
            return from_fields(Beat, unsealed(parse_object(content)), drops_unknown=True)
        except ValueError:
            return None


def beat_path(folder: Path, replica: str) -> Path:
    """The file of a replica's heartbeat in the folder of leases."""
    return folder / f"{replica}{BEAT_SUFFIX}"


def replicas_in(folder: Path) -> list[str]:
    """The replicas that have a heartbeat, at work or not, ascending."""
    return sorted(
        name.removesuffix(BEAT_SUFFIX) for name in names_within(folder) if name.endswith(BEAT_SUFFIX)
    )


class Heartbeat:
    """This replica's own file, written by a thread, since a pass may take long."""

    def __init__(
        self,
        folder: Path,
        replica: str,
        *,
        silent_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = beat_path(folder, replica)
        self._clock = clock
        self._start = clock()
        self._beat = Beat(replica, Process.current(), silent_after_s)
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The models are loaded: rates count from here."""
        self._start = self._clock()

    def count(self, num_tokens: int) -> None:
        """Count a finished row and its tokens; the next beat tells the others."""
        self._beat.num_rows += 1
        self._beat.num_tokens += num_tokens

    def wait_for(self, num_rows: int) -> None:
        """So many rows wait for a function of the user now."""
        self._beat.num_waiting = num_rows

    def beat(self) -> None:
        """Write the next number. Raises OSError."""
        self._beat.count += 1
        self._beat.elapsed_s = round(self._clock() - self._start, 3)
        if isinstance(self.path, StorePath):
            self.path.write_bytes(self._beat.to_bytes())
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, self._beat.to_bytes(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def start(self) -> None:
        """Beat once, then start the thread. Raises OSError."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the file."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        was_written = True
        while not self._has_ended.wait(self._beat.silent_after_s / BEATS_PER_SILENCE):
            was_written = self._try_to_beat(warns=was_written)

    def _try_to_beat(self, *, warns: bool) -> bool:
        try:
            self.beat()
        except OSError as error:
            if warns:
                logger.warning("the heartbeat cannot be written, so other replicas may take over: %s", error)
            return False
        return True


@dataclass
class _Sighting:
    """``since``: when looks began that were never far apart; ``num_far``: looks so long after the one before
    that by themselves they tell nothing."""

    content: bytes
    since: float
    seen_at: float
    num_far: int = 0

    def is_silent(self, silent_after_s: float) -> bool:
        return self.seen_at - self.since >= silent_after_s or self.num_far >= MAX_FAR_LOOKS


class Watch:
    """Tells whether other replicas are still at work, from what it sees each time that it is asked."""

    def __init__(
        self, folder: Path, *, silent_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``silent_after_s``: for files that do not say how long they may stay unchanged."""
        self._folder = folder
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._sightings: dict[Path, _Sighting] = {}

    def beat(self, replica: str) -> Beat | None:
        """A replica's last beat; None if it cannot be read."""
        return Beat.from_bytes(_content(beat_path(self._folder, replica)))

    def is_gone(self, replica: str) -> bool:
        """Whether its process has ended, or its file has not changed for too long."""
        return self.is_at_work(replica) is False

    def is_at_work(self, replica: str) -> bool | None:
        """False if it is gone, True if its process lives or its file has changed since the last look, None if
        another look is needed."""
        path = beat_path(self._folder, replica)
        last = self._sightings.get(path)
        # It does not beat more often than it is read.
        is_read = last is None or self._clock() - last.seen_at >= self._silent_after_s / BEATS_PER_SILENCE
        content = _content(path) if last is None or is_read else last.content
        beat = Beat.from_bytes(content)
        is_alive = beat.process.is_alive() if beat is not None else None
        has_beaten = last is not None and last.content != content
        silent_after_s = beat.silent_after_s if beat is not None else self._silent_after_s
        is_silent = (
            self._is_silent(path, content, silent_after_s)
            if last is None or is_read
            else last.is_silent(silent_after_s)
        )
        if is_alive is False or is_silent:
            return False
        return is_alive or has_beaten or None

    def is_unchanged(self, path: Path) -> bool:
        """Whether a file that is not a heartbeat has not changed for too long."""
        return self._is_silent(path, _content(path), self._silent_after_s)

    def _is_silent(self, path: Path, content: bytes, silent_after_s: float) -> bool:
        now = self._clock()
        last = self._sightings.get(path)
        if last is None or last.content != content:
            self._sightings[path] = _Sighting(content, now, now)
            return False
        # After a long time without a look little is known: a file server's pause stops writer and reader.
        if now - last.seen_at > silent_after_s / 2:
            last.since, last.num_far = now, last.num_far + 1
        last.seen_at = now
        return last.is_silent(silent_after_s)


def _content(path: Path) -> bytes:
    """Empty if there is no such file."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
