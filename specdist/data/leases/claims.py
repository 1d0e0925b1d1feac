"""Which replica works on what, in a folder shared by many nodes, without locks of the file system.

The claims of a name are files ``name.00001``, ``name.00002``, ...: the highest number is in force. A claim is
made, taken over or released by creating the next number, which the file server lets only one replica do. A
holder that was paused and lost its claim finds a higher number; its writes went to files with its own. In a
run of many shards a name begins with that of a numbered folder (``00012/shard-12345``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specdist.data.leases.claim_folders import BEAT_SUFFIX, listings
from specdist.data.leases.heartbeat import Watch, now_utc
from specdist.data.leases.shard_choice import name_hashes
from specdist.data.store.files import names_in, publish, temporary_path, unique_tag
from specdist.data.store.storage import StorePath
from specdist.utils.json_values import from_fields, parse_json

# An empty file named after a replica that has nothing to do.
WAITING_SUFFIX = ".waiting"
# A claim's file is read again after so many looks at the heartbeat of its holder.
MAX_LOOKS = 8
# A listing counts as much as so many names.
NAMES_PER_LISTING = 1000
CLAIM_FILE = re.compile(r"([a-z]+(?:-\d{5,}){0,2})\.(\d{5,})")
SHARD_CLAIM = re.compile(r"(?:\d{5,}/)?(?:shard|split)-(\d{5,})(?:-(\d{5,}))?")


@dataclass(frozen=True)
class Claim:
    """``generation`` is the number of the claim, unique among the claims of a name."""

    name: str
    generation: int

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.generation:05d}"


@dataclass(frozen=True)
class Holding:
    """The content of a claim's file. ``replica``: None if it was released; ``since``: for people; ``rows``:
    those of a split, which every claim of it repeats."""

    replica: str | None
    since: str
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class View:
    """One listing of the folder: the claim in force of every claimed name, and how many replicas have a
    heartbeat there or say that they wait, some of which may have ended. ``num_files``: listed in all; a
    numbered folder counts as a thousand more."""

    latest: dict[str, Claim]
    num_replicas: int
    num_waiting: int
    num_files: int

    @functools.cached_property
    def splits(self) -> list[tuple[int, Claim]]:
        """The claims of splits, with the number of the shard."""
        return [(place[0], claim) for place, claim in self._places if place[1] is not None]

    @functools.cached_property
    def fresh_splits(self) -> list[tuple[int, Claim]]:
        """Those that nobody has taken yet."""
        return [(shard, claim) for shard, claim in self.splits if claim.generation == 1]

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """The names of shards and splits that were taken, some of them released since, with the shard."""
        return {claim.name: place[0] for place, claim in self._places
                if place[1] is None or claim.generation > 1}  # fmt: skip

    @functools.cached_property
    def held_hashes(self) -> np.ndarray:
        """Of their names, for :func:`specdist.data.leases.shard_choice.watched`."""
        return name_hashes(self.held)

    @functools.cached_property
    def held_names(self) -> list[str]:
        return list(self.held)

    @functools.cached_property
    def in_order(self) -> np.ndarray:
        """The claimed shards, ascending."""
        return np.sort(np.fromiter(self.shards, np.int64, len(self.shards)))

    @functools.cached_property
    def shards(self) -> dict[int, Claim]:
        """The claims of shards, by their numbers."""
        return {place[0]: claim for place, claim in self._places if place[1] is None}

    @property
    def _places(self) -> Iterator[tuple[tuple[int, int | None], Claim]]:
        for name, claim in self.latest.items():
            if (place := shard_and_split(name)) is not None:
                yield place, claim


class Claims:
    """The claims in a folder as one replica sees and makes them."""

    def __init__(self, folder: Path, replica: str, watch: Watch) -> None:
        self._folder = folder
        self._replica = replica
        self._watch = watch
        # The holders of claims as last read, and how often they were found at work since.
        self._holders: dict[Claim, tuple[str, int]] = {}

    def look(self) -> View:
        """List the folder, and the numbered ones in it."""
        found = listings(self._folder)
        names = [name for listed in found.values() for name in listed]
        claims = [claim for level, listed in found.items() for name in listed
                  if (claim := _claim_of(name, level)) is not None]  # fmt: skip
        in_order = sorted(claims, key=lambda claim: claim.generation)
        return View(
            {claim.name: claim for claim in in_order},
            sum(name.endswith(BEAT_SUFFIX) for name in names),
            sum(name.endswith(WAITING_SUFFIX) for name in names),
            len(names) + NAMES_PER_LISTING * (len(found) - 1),
        )

    def latest(self) -> dict[str, Claim]:
        """The claim in force of every claimed name."""
        return self.look().latest

    def holding(self, claim: Claim) -> Holding | None:
        """What the claim's file says; None if it is gone or damaged."""
        try:
            return from_fields(Holding, parse_json((self._folder / claim.file_name).read_bytes()))
        except (OSError, ValueError):
            return None

    def offer(self, name: str, rows: Sequence[int]) -> Claim | None:
        """The first claim of a split, free for everybody; None if there is one already. Raises OSError."""
        claim = Claim(name, 1)
        return claim if self._create(claim, None, tuple(rows)) else None

    def take_split(self, latest: Claim) -> tuple[Claim, tuple[int, ...]] | None:
        """Claim a split as :meth:`take` does; also its rows. One whose file is damaged is given up: its rows
        are then the shard's again."""
        if not self._is_free(latest):
            return None
        holding = self.holding(latest)
        if holding is None or holding.rows is None:
            self._remove(latest)
            return None
        claim = self._take(latest.name, latest, latest.generation + 1, holding.rows)
        return None if claim is None else (claim, holding.rows)

    def take(self, name: str, latest: Claim | None, *, above: int = 0) -> Claim | None:
        """Claim a name that is free or whose holder is gone; None if another replica holds it.

        Args:
            latest: the claim in force as last seen; the result is None if there is a newer one by now.
            above: the new generation is higher than this.
        """
        if latest is not None and not self._is_free(latest):
            return None
        return self._take(name, latest, max(above, latest.generation if latest else 0) + 1)

    def _take(
        self, name: str, latest: Claim | None, generation: int, rows: tuple[int, ...] | None = None
    ) -> Claim | None:
        claim = Claim(name, generation)
        if not self._create(claim, self._replica, rows):
            return None
        # ``latest`` may be out of date, and numbers below the claim in force free. If it is gone, all claims
        # were removed meanwhile, and numbers may have begun anew.
        found = self._all_of(name)
        if found[-1:] != [claim] or (latest is not None and not self._is_there(latest)):
            self._remove(claim)
            return None
        for replaced in found[:-1]:
            self._remove(replaced)
        return claim

    def is_held(self, claim: Claim) -> bool:
        """Whether a claim of this replica is still in force."""
        return self.in_force(claim.name) == claim

    def in_force(self, name: str) -> Claim | None:
        """The claim in force of this name alone, by a listing of its folder."""
        return next(reversed(self._all_of(name)), None)

    def release(self, claim: Claim, rows: tuple[int, ...] | None = None) -> None:
        """Give the claim back if it is still in force, that of a split with its rows. Raises nothing if the
        disk fails."""
        try:
            if self.is_held(claim):
                freed = Claim(claim.name, claim.generation + 1)
                if self._create(freed, None, rows):
                    self._trim(freed)
        except OSError:
            # A full disk has no room for the next number, but a file can be removed.
            with contextlib.suppress(OSError):
                self._remove(claim)

    def forget(self, name: str) -> None:
        """Remove all claims of a name that will not be claimed again, the lowest first: the one in force
        stays in force until the end."""
        for claim in self._all_of(name):
            self._remove(claim)

    def forget_shard(self, shard: int, level: str = "") -> None:
        """Remove the claims of a complete shard as :meth:`forget` does, after those of its splits, and their
        numbered folder if it is empty now."""
        files = self._names(level, f"shard-{shard:05d}.", f"split-{shard:05d}-")
        of_shard = [claim for file in files if (claim := _claim_of(file, level)) is not None]
        name = shard_name(shard, level)
        for claim in sorted(of_shard, key=lambda claim: (claim.name == name, claim.generation)):
            self._remove(claim)
        if level:
            with contextlib.suppress(OSError):
                (self._folder / level).rmdir()

    def is_suspect(self, claim: Claim) -> bool:
        """Whether the holder of another's claim may be gone, by what was seen so far."""
        return claim in self._holders and self._watch.is_suspect(self._holders[claim][0])

    def is_claimed(self, name: str) -> bool:
        """Whether there is any claim of the name, by a listing."""
        return bool(self._all_of(name))

    def remove_up_to(self, claim: Claim) -> None:
        """Remove a claim of this replica and those that it replaced; a newer one stays."""
        self._trim(claim)
        self._remove(claim)

    def _is_there(self, claim: Claim) -> bool:
        try:
            # Opened, since NFS may answer a stat from memory.
            with (self._folder / claim.file_name).open("rb"):
                return True
        except FileNotFoundError:
            return False

    def _is_free(self, claim: Claim) -> bool:
        holder, num_looks = self._holders.pop(claim, (None, 0))
        # A claim's file may be another's after all claims were removed: it is read again before it counts as
        # free, and from time to time.
        if holder is not None and num_looks < MAX_LOOKS and not self._watch.is_gone(holder):
            self._holders[claim] = holder, num_looks + 1
            return False
        holding = self.holding(claim)
        if holding is None:
            return self._watch.is_unchanged(self._folder / claim.file_name)
        if holding.replica is None or self._watch.is_gone(holding.replica):
            return True
        self._holders[claim] = holding.replica, 1
        return False

    def _create(self, claim: Claim, replica: str | None, rows: tuple[int, ...] | None = None) -> bool:
        path = self._folder / claim.file_name
        content = json.dumps(asdict(Holding(replica, now_utc(), rows)))
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
                # Another replica removed the temporary file, or the numbered folder, which was empty.
                path.parent.mkdir(exist_ok=True)
            except OSError:
                # A claim whose holder takes it for failed would never be released.
                with contextlib.suppress(OSError):
                    if path.samefile(temporary):
                        path.unlink()
                raise
            finally:
                temporary.unlink(missing_ok=True)

    def _trim(self, claim: Claim) -> None:
        """Remove the claims that this one replaced."""
        for other in self._all_of(claim.name):
            if other.generation < claim.generation:
                self._remove(other)

    def _remove(self, claim: Claim) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / claim.file_name).unlink()

    def _all_of(self, name: str) -> list[Claim]:
        """The claims of a name by ascending generation."""
        level, _, last = name.rpartition("/")
        found = (_claim_of(file, level) for file in self._names(level, f"{last}."))
        return sorted(
            (claim for claim in found if claim is not None and claim.name == name),
            key=lambda claim: claim.generation,
        )

    def _names(self, level: str, *prefixes: str) -> list[str]:
        try:
            return names_in(self._folder / level, *prefixes)
        except FileNotFoundError:
            if not level:
                raise
            return []


def shard_name(shard: int, level: str = "") -> str:
    """The name under which a shard is claimed; ``level``: of its numbered folder."""
    return f"{level}/shard-{shard:05d}".lstrip("/")


def split_name(shard: int, number: int, level: str = "") -> str:
    """The same of a split of a shard."""
    return f"{level}/split-{shard:05d}-{number:05d}".lstrip("/")


def claim_files(folder: Path) -> list[tuple[Path, int]]:
    """All claims of shards and their splits, with the shard's number, ascending; none without the folder."""
    with contextlib.suppress(FileNotFoundError):
        found = ((claim, shard_and_split(claim.name)) for level, names in listings(folder).items()
                 for name in names if (claim := _claim_of(name, level)) is not None)  # fmt: skip
        return sorted((folder / claim.file_name, place[0]) for claim, place in found if place is not None)
    return []


@functools.lru_cache(maxsize=2**16)
def shard_and_split(name: str) -> tuple[int, int | None] | None:
    """The shard of a claimed name, and the number of the split if it is one; None if it is of neither."""
    match = SHARD_CLAIM.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]) if match[2] else None)


@functools.lru_cache(maxsize=2**16)
def _claim_of(file_name: str, level: str) -> Claim | None:
    """``level``: its numbered folder. None if the file is not a claim."""
    match = CLAIM_FILE.fullmatch(file_name)
    return Claim(f"{level}/{match[1]}".lstrip("/"), int(match[2])) if match else None
