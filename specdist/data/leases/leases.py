"""Which replica works on what, in a folder shared by many nodes, without locks of the file system.

The leases of a name are files ``name.00001``, ``name.00002``, ...: the highest number is in force. A lease is
made, taken over or released by creating the next number, which the file server lets only one replica do. A
holder that was paused and lost its lease finds a higher number; its writes went to files with its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from specdist.data.leases.heartbeat import Watch, now_utc
from specdist.data.store.files import names_in, publish, temporary_path, unique_tag
from specdist.data.store.storage import StorePath
from specdist.utils.json_values import from_fields, parse_json

# A lease's file is read again after so many looks at the heartbeat of its holder.
MAX_LOOKS = 8
LEASE_FILE = re.compile(r"([a-z]+(?:-\d{5,})?)\.(\d{5,})")
SHARD_LEASE = re.compile(r"shard-(\d{5,})")


@dataclass(frozen=True)
class Lease:
    """``generation`` is the number of the lease, unique among the leases of a name."""

    name: str
    generation: int

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.generation:05d}"


@dataclass(frozen=True)
class Holding:
    """The content of a lease's file. ``replica``: None if it was released; ``since``: for people."""

    replica: str | None
    since: str


@dataclass(frozen=True)
class View:
    """One listing of the folder: the lease in force of every leased name. ``num_files``: listed in all."""

    latest: dict[str, Lease]
    num_files: int

    @functools.cached_property
    def shards(self) -> dict[int, Lease]:
        """The leases of shards, by their numbers."""
        found = ((shard_of(name), lease) for name, lease in self.latest.items())
        return {shard: lease for shard, lease in found if shard is not None}


class Leases:
    """The leases in a folder as one replica sees and makes them."""

    def __init__(self, folder: Path, replica: str, watch: Watch) -> None:
        self._folder = folder
        self._replica = replica
        self._watch = watch
        # The holders of leases as last read, and how often they were found at work since.
        self._holders: dict[Lease, tuple[str, int]] = {}

    def look(self) -> View:
        """List the folder."""
        names = names_in(self._folder)
        leases = [lease for name in names if (lease := _lease_of(name)) is not None]
        in_order = sorted(leases, key=lambda lease: lease.generation)
        return View({lease.name: lease for lease in in_order}, len(names))

    def latest(self) -> dict[str, Lease]:
        """The lease in force of every leased name."""
        return self.look().latest

    def holding(self, lease: Lease) -> Holding | None:
        """What the lease's file says; None if it is gone or damaged."""
        try:
            return from_fields(Holding, parse_json((self._folder / lease.file_name).read_bytes()))
        except (OSError, ValueError):
            return None

    def take(self, name: str, latest: Lease | None, *, above: int = 0) -> Lease | None:
        """Lease a name that is free or whose holder is gone; None if another replica holds it.

        Args:
            latest: the lease in force as last seen; the result is None if there is a newer one by now.
            above: the new generation is higher than this.
        """
        if latest is not None and not self._is_free(latest):
            return None
        lease = Lease(name, max(above, latest.generation if latest else 0) + 1)
        if not self._create(lease, self._replica):
            return None
        # ``latest`` may be out of date, and numbers below the lease in force free. If it is gone, all leases
        # were removed meanwhile, and numbers may have begun anew.
        found = self._all_of(name)
        if found[-1:] != [lease] or (latest is not None and not self._is_there(latest)):
            self._remove(lease)
            return None
        for replaced in found[:-1]:
            self._remove(replaced)
        return lease

    def is_held(self, lease: Lease) -> bool:
        """Whether a lease of this replica is still in force."""
        return self.in_force(lease.name) == lease

    def in_force(self, name: str) -> Lease | None:
        """The lease in force of this name alone, by a listing of its folder."""
        return next(reversed(self._all_of(name)), None)

    def release(self, lease: Lease) -> None:
        """Give the lease back if it is still in force. Raises nothing if the disk fails."""
        try:
            if self.is_held(lease):
                freed = Lease(lease.name, lease.generation + 1)
                if self._create(freed, None):
                    self._trim(freed)
        except OSError:
            # A full disk has no room for the next number, but a file can be removed.
            with contextlib.suppress(OSError):
                self._remove(lease)

    def forget(self, name: str) -> None:
        """Remove all leases of a name that will not be leased again, the lowest first: the one in force
        stays in force until the end."""
        for lease in self._all_of(name):
            self._remove(lease)

    def remove_up_to(self, lease: Lease) -> None:
        """Remove a lease of this replica and those that it replaced; a newer one stays."""
        self._trim(lease)
        self._remove(lease)

    def _is_there(self, lease: Lease) -> bool:
        try:
            # Opened, since NFS may answer a stat from memory.
            with (self._folder / lease.file_name).open("rb"):
                return True
        except FileNotFoundError:
            return False

    def _is_free(self, lease: Lease) -> bool:
        holder, num_looks = self._holders.pop(lease, (None, 0))
        # A lease's file may be another's after all leases were removed: it is read again before it counts as
        # free, and from time to time.
        if holder is not None and num_looks < MAX_LOOKS and not self._watch.is_gone(holder):
            self._holders[lease] = holder, num_looks + 1
            return False
        holding = self.holding(lease)
        if holding is None:
            return self._watch.is_unchanged(self._folder / lease.file_name)
        if holding.replica is None or self._watch.is_gone(holding.replica):
            return True
        self._holders[lease] = holding.replica, 1
        return False

    def _create(self, lease: Lease, replica: str | None) -> bool:
        path = self._folder / lease.file_name
        content = json.dumps(asdict(Holding(replica, now_utc())))
        if isinstance(path, StorePath):
            return path.create(content.encode())
        while True:
            temporary = temporary_path(path, unique_tag())
            try:
                temporary.write_text(content)
                return publish(temporary, path)
            except FileNotFoundError:
                if not self._folder.is_dir():
                    raise
                # Another replica removed the temporary file.
            except OSError:
                # A lease whose holder takes it for failed would never be released.
                with contextlib.suppress(OSError):
                    if path.samefile(temporary):
                        path.unlink()
                raise
            finally:
                temporary.unlink(missing_ok=True)

    def _trim(self, lease: Lease) -> None:
        """Remove the leases that this one replaced."""
        for other in self._all_of(lease.name):
            if other.generation < lease.generation:
                self._remove(other)

    def _remove(self, lease: Lease) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / lease.file_name).unlink()

    def _all_of(self, name: str) -> list[Lease]:
        """The leases of a name by ascending generation."""
        found = map(_lease_of, names_in(self._folder, f"{name}."))
        return sorted(
            (lease for lease in found if lease is not None and lease.name == name),
            key=lambda lease: lease.generation,
        )


def shard_name(shard: int) -> str:
    """The name under which a shard is leased."""
    return f"shard-{shard:05d}"


def lease_files(folder: Path) -> list[tuple[Path, int]]:
    """The leases of shards, with the shard's number, ascending; none without the folder."""
    with contextlib.suppress(FileNotFoundError):
        found = ((lease, shard_of(lease.name)) for name in names_in(folder)
                 if (lease := _lease_of(name)) is not None)  # fmt: skip
        return sorted((folder / lease.file_name, shard) for lease, shard in found if shard is not None)
    return []


def shard_of(name: str) -> int | None:
    """The shard of a leased name; None if it is of none."""
    match = SHARD_LEASE.fullmatch(name)
    return None if match is None else int(match[1])


@functools.lru_cache(maxsize=2**16)
def _lease_of(file_name: str) -> Lease | None:
    """The lease that a file's name describes; None if the file is not a lease."""
    match = LEASE_FILE.fullmatch(file_name)
    return Lease(match[1], int(match[2])) if match else None
