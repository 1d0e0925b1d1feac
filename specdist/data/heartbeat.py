"""Signs of life of the replicas that work on one folder, on whatever nodes.

A replica writes a file with a growing number. Others call it gone when its process has ended, where they can
see that, or when the file's content has not changed for long, by their own clock: clocks of two nodes, and
times that a file server gives to files, are never compared.
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

from specdist.data.files import sealed, unsealed
from specdist.utils.json_values import from_fields, parse_object

BEATS_PER_SILENCE = 12
BEAT_SUFFIX = ".beat"
# Always as long: it is written over in one place, since a new file under an old name may stay unseen on NFS.
BEAT_BYTES = 1024

logger = logging.getLogger(__name__)


def now_utc() -> str:
    """For people only: no decision depends on it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Process:
    """A process, as others may look for it.

    ``machine`` is where its number means something, empty if unknown. ``started`` is in ticks since the
    machine's start: a number is given to one process after another.
    """

    host: str
    pid: int
    machine: str
    started: int

    @staticmethod
    def current() -> Process:
        pid = os.getpid()
        found = _state_and_start(pid)
        return Process(
            host=socket.gethostname(), pid=pid, machine=_machine(), started=found[1] if found else 0
        )

    def is_alive(self) -> bool | None:
        """None where it cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        found = _state_and_start(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    """The running system and the set of processes that can be seen: containers share a host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        # The second field is the name in brackets, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@dataclass
class Beat:
    """The content of a replica's file. ``silent_after_s``: how long it may stay the same; ``elapsed_s``: for
    how long it has worked, with models loaded, on the rows and tokens that it has finished."""

    replica: str
    process: Process
    silent_after_s: float
    started: str = field(default_factory=now_utc)
    elapsed_s: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    count: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(sealed(asdict(self))).encode().ljust(BEAT_BYTES - 1) + b"\n"

    @staticmethod
    def from_bytes(content: bytes) -> Beat | None:
        """None for what is not a beat, such as one that was read while it was written."""
        try:
            return from_fields(Beat, unsealed(parse_object(content)))
        except ValueError:
            return None


def beat_path(folder: Path, replica: str) -> Path:
    return folder / f"{replica}{BEAT_SUFFIX}"


class Heartbeat:
    """This replica's own file, written from a thread of its own: a pass may take long."""

    def __init__(
        self,
        folder: Path,
        replica: str,
        *,
        silent_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = beat_path(folder, replica)
        self._clock = clock
        self._start = clock()
        self._beat = Beat(replica, Process.current(), silent_after_s)
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_failing = False

    def begin(self) -> None:
        """Everything is loaded: rates count from here."""
        self._start = self._clock()

    def count(self, num_tokens: int) -> None:
        """One more row, of so many tokens; others read it with the next beat."""
        self._beat.num_rows += 1
        self._beat.num_tokens += num_tokens

    def beat(self) -> None:
        """Write the next number. Raises OSError."""
        self._beat.count += 1
        self._beat.elapsed_s = round(self._clock() - self._start, 3)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, self._beat.to_bytes(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def start(self) -> None:
        """Beat once, then go on from a thread. Raises OSError."""
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The last sign of life: the file goes."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._has_ended.wait(self._beat.silent_after_s / BEATS_PER_SILENCE):
            self._try_to_beat()

    def _try_to_beat(self) -> None:
        try:
            self.beat()
        except OSError as error:
            if not self._is_failing:
                logger.warning("the heartbeat cannot be written, so other replicas may take over: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


@dataclass
class _Sighting:
    content: bytes
    since: float
    seen_at: float


class Watch:
    """Judges whether other replicas are still there, from what it sees whenever it is asked."""

    def __init__(
        self, folder: Path, *, silent_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``silent_after_s``: for files that do not say how long they may stay the same."""
        self._folder = folder
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._sightings: dict[Path, _Sighting] = {}

    def beat(self, replica: str) -> Beat | None:
        """A replica's last beat, if it can be read."""
        return Beat.from_bytes(_content(beat_path(self._folder, replica)))

    def is_gone(self, replica: str) -> bool:
        """Whether its process has ended, or it has been silent for longer than it may be."""
        return self.is_at_work(replica) is False

    def is_at_work(self, replica: str) -> bool | None:
        """False if it is gone, True if its process is there or it has beaten since it was last looked at;
        None where more looks are needed."""
        path = beat_path(self._folder, replica)
        content = _content(path)
        beat = Beat.from_bytes(content)
        is_alive = beat.process.is_alive() if beat is not None else None
        last = self._sightings.get(path)
        has_beaten = last is not None and last.content != content
        silent_after_s = beat.silent_after_s if beat is not None else self._silent_after_s
        if is_alive is False or self._is_silent(path, content, silent_after_s):
            return False
        return is_alive or has_beaten or None

    def is_unchanged(self, path: Path) -> bool:
        """The same judgement on a file that is not a heartbeat."""
        return self._is_silent(path, _content(path), self._silent_after_s)

    def _is_silent(self, path: Path, content: bytes, silent_after_s: float) -> bool:
        now = self._clock()
        last = self._sightings.get(path)
        # Who has not looked for long cannot tell: a file server's pause stops both writer and reader.
        if last is None or last.content != content or now - last.seen_at > silent_after_s / 2:
            self._sightings[path] = _Sighting(content, now, now)
            return False
        last.seen_at = now
        return now - last.since >= silent_after_s


def _content(path: Path) -> bytes:
    """Empty for a file that is not there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
