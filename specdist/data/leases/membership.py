"""A replica among those that work on a run folder: its name, heartbeat and leases."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from specdist.data.file_names import leases_in
from specdist.data.leases.heartbeat import (
    BEAT_SUFFIX,
    BEATS_MISSED,
    BEATS_PER_SILENCE,
    Heartbeat,
    Watch,
    beat_path,
    replicas_in,
)
from specdist.data.leases.leases import LEASE_FILE, Lease, Leases, View
from specdist.data.store.files import TEMPORARY_SUFFIX, names_in, unique_tag
from specdist.utils.errors import UserError

SETUP = "setup"
# Holds the name of the replica that last completed in the run's folder what crashes had left undone.
TIDIER = "tidier"
POLLS_PER_SILENCE = 20
MAX_POLL_S = 0.5
# The longer a listing is, the less often replicas look; but never too seldom to tell silence in time.
S_PER_LISTED_FILE = 1.25e-3
MAX_SILENCE_SHARE = 0.35


def replica_name() -> str:
    """Host and process, for people, and a tag that makes the name unique."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:40]
    return f"{host}-{os.getpid()}-{unique_tag()[:4]}"


class Membership:
    """A replica's presence: from :meth:`join` to :meth:`leave` the others see it."""

    def __init__(
        self,
        output: Path,
        *,
        silent_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        name: str | None = None,
    ) -> None:
        """``silent_after_s``: seconds without a heartbeat after which a replica is gone."""
        self.output = output
        self._folder = leases_in(output)
        self._poll_s = min(MAX_POLL_S, silent_after_s / POLLS_PER_SILENCE)
        self.silent_after_s, self.clock, self._sleep = silent_after_s, clock, sleep
        self._tidier_path = self._folder / TIDIER
        self._was_named = name is not None
        self.replica = name or replica_name()
        self.heartbeat = Heartbeat(self._folder, self.replica, silent_after_s=silent_after_s, clock=clock)
        self.watch = Watch(self._folder, silent_after_s=silent_after_s, clock=clock)
        self.leases = Leases(self._folder, self.replica, self.watch)

    def join(self) -> None:
        """Raises :class:`UserError` if the folder cannot be written."""
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file: give a folder")
        try:
            self.create_folder()
            self.heartbeat.start()
            # An earlier program of the same process may have failed without releasing its leases. A new name
            # has none, and all the leases of many replicas would be read for nothing.
            for lease in self.leases.latest().values() if self._was_named else ():
                holding = self.leases.holding(lease)
                if holding is not None and holding.replica == self.replica:
                    self.leases.release(lease)
        except OSError as error:
            raise UserError(f"--output {self.output} cannot be written: {error}") from error

    def create_folder(self) -> None:
        """The folder of heartbeats and leases. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def leave(self) -> None:
        """End the membership, after all leases were released."""
        self.heartbeat.stop()
        with contextlib.suppress(OSError):
            if self._tidier_path.exists() and self._tidier_path.read_text() == self.replica:
                self._tidier_path.unlink()
            # The last one to remove its heartbeat sees no other.
            if not self.tidy():
                self._forget_setup()

    def withdraw(self) -> None:
        """Leave, and remove the leases' folder: this is not a run folder."""
        self.leave()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def poll_s(self, num_files: int) -> float:
        """Seconds until the next look, at so many files, of a replica that waits for others; by chance a
        little more or less."""
        return (self._poll_s + self.listing_s(num_files)) * random.uniform(0.8, 1.2)

    def listing_s(self, num_files: int) -> float:
        """Seconds from one listing of so many files to the next one of a replica that is at work."""
        return min(S_PER_LISTED_FILE * num_files, MAX_SILENCE_SHARE * self.silent_after_s)

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """One replica at a time may change what belongs to all; the others wait."""
        try:
            view = self.leases.look()
            while (lease := self.take_setup(view)) is None:
                self._sleep(self.poll_s(view.num_files))
                view = self.leases.look()
        except OSError as error:
            raise UserError(f"--output {self.output} cannot be written: {error}") from error
        try:
            yield
        finally:
            self.leases.release(lease)

    def take_setup(self, view: View) -> Lease | None:
        """Try once for what :meth:`setup` waits for."""
        return self.leases.take(SETUP, view.latest.get(SETUP))

    def _forget_setup(self) -> None:
        """The last replica to leave removes the leases of the setup.

        Others may join meanwhile: a replica writes its heartbeat before it looks at any lease. One that is
        not among the others while the setup is held here has not looked yet, so it will see this lease and
        wait, or see none and begin anew.
        """
        latest = self.leases.latest().get(SETUP)
        if latest is None or self.others():
            return
        lease = self.leases.take(SETUP, latest)
        if lease is None:
            return
        if self.others():
            self.leases.release(lease)
        else:
            self._tidier_path.unlink(missing_ok=True)
            self.leases.remove_up_to(lease)

    def others(self) -> list[str]:
        """The other replicas that have a heartbeat, at work or not."""
        return [name for name in replicas_in(self._folder) if name != self.replica]

    def find_another(self) -> str | None:
        """Another replica that is at work, for a message; waits until it is certain that there is none."""
        names = self.others()
        while True:
            are_at_work = {name: self.watch.is_at_work(name) for name in names}
            for name in filter(are_at_work.get, names):
                beat = self.watch.beat(name)
                return str(beat.process) if beat else name
            names = [name for name in names if are_at_work[name] is None]
            if not names:
                return None
            self._sleep(self._poll_s)

    def another_has_tidied(self) -> bool:
        """Whether another replica completed what crashes had left undone, and is at work; if not, this one is
        to do it, and says so. To be asked within :meth:`setup`."""
        if self._is_tidier_at_work():
            return True
        self._tidier_path.write_text(self.replica)
        return False

    def _is_tidier_at_work(self) -> bool:
        """Ages are told by the file server's clock: this replica's heartbeat is new."""
        try:
            name = self._tidier_path.read_text()
            times = (beat_path(self._folder, replica).stat().st_mtime for replica in (self.replica, name))
            is_new = next(times) - next(times) < BEATS_MISSED * self.silent_after_s / BEATS_PER_SILENCE
            return name != self.replica and is_new and self.watch.is_at_work(name) is not False
        except OSError:
            return False

    def tidy(self) -> list[str]:
        """Remove half-made leases, and the heartbeats of replicas that have ended, or are known to be silent;
        one that was only paused writes its heartbeat anew. Returns the others that had a heartbeat."""
        for name in names_in(self._folder):
            if name.endswith(TEMPORARY_SUFFIX):
                (self._folder / name).unlink(missing_ok=True)
        others = self.others()
        gone = {name for name in others if self.watch.is_gone(name)}
        for name in gone - self._holders() if gone else ():
            beat_path(self._folder, name).unlink(missing_ok=True)
        return [name for name in others if name not in gone]

    def _holders(self) -> set[str | None]:
        """The holders of the leases in force, each of which is read."""
        holdings = map(self.leases.holding, self.leases.latest().values())
        return {holding.replica for holding in holdings if holding is not None}


def is_membership_file(name: str) -> bool:
    """Whether a file or folder in the leases' folder was made by a replica."""
    return (
        name.endswith((BEAT_SUFFIX, TEMPORARY_SUFFIX))
        or LEASE_FILE.fullmatch(name) is not None
        or name == TIDIER
    )
