"""Who works on what, in a folder that replicas on many nodes share. Needs no locks of the file system.

What can be claimed has a name, and its claims are files ``name.00001``, ``name.00002``, ...: the highest
number is in force. A claim is made, taken over and given back by creating the next number, which the file
server lets only one replica do. So a holder that was paused and taken over finds a higher number than its
own; whatever it wrote in between went to files that carry its number.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from specdist.data.files import TEMPORARY_SUFFIX, publish, temporary_path, unique_tag
from specdist.data.heartbeat import Watch, now_utc
from specdist.utils.json_values import from_fields, parse_json

CLAIM_FILE = re.compile(r"([a-z]+(?:-\d{5})?)\.(\d{5,})")


@dataclass(frozen=True)
class Claim:
    """The number of a claim is its generation: no two claims of a name have the same."""

    name: str
    generation: int

    @property
    def file_name(self) -> str:
        return f"{self.name}.{self.generation:05d}"


@dataclass(frozen=True)
class Holding:
    """What a claim's file says: who holds it, since when (for people); nobody, where it was given back."""

    replica: str | None
    since: str


class Claims:
    """The claims of one replica, and what it sees of the others'."""

    def __init__(self, folder: Path, replica: str, watch: Watch) -> None:
        self._folder = folder
        self._replica = replica
        self._watch = watch

    def latest(self) -> dict[str, Claim]:
        """The claim in force of every name that has one."""
        found: dict[str, Claim] = {}
        for claim in self._all():
            if claim.name not in found or found[claim.name].generation < claim.generation:
                found[claim.name] = claim
        return found

    def holding(self, claim: Claim) -> Holding | None:
        """None if its file is gone or cannot be read."""
        try:
            return from_fields(Holding, parse_json((self._folder / claim.file_name).read_bytes()))
        except (OSError, ValueError):
            return None

    def take(self, name: str, latest: Claim | None, *, above: int = 0) -> Claim | None:
        """Claim what nobody holds, or take it over from who is gone; None if another holds it.

        Args:
            latest: the claim in force as seen before; if there is a newer one by now, the answer is None.
            above: the new generation is to be higher than this.
        """
        if latest is not None and not self._is_free(latest):
            return None
        claim = Claim(name, max(above, latest.generation if latest else 0) + 1)
        if not self._create(claim, self._replica):
            return None
        # What was seen may have been old: numbers between that and the one in force may be free.
        # And where the claim seen before is gone, all were removed meanwhile and numbers may begin anew.
        if not self.is_held(claim) or (latest is not None and not self._is_there(latest)):
            self._remove(claim)
            return None
        self._trim(claim)
        return claim

    def is_held(self, claim: Claim) -> bool:
        """Whether this claim, once made here, is still in force."""
        return self.latest().get(claim.name) == claim

    def release(self, claim: Claim) -> None:
        """Give it back, if it is still in force; nothing is raised for a broken disk."""
        try:
            if self.is_held(claim):
                freed = Claim(claim.name, claim.generation + 1)
                if self._create(freed, None):
                    self._trim(freed)
        except OSError:
            # A full disk has no room for a file that says so; to remove one takes none.
            with contextlib.suppress(OSError):
                self._remove(claim)

    def forget(self, name: str) -> None:
        """Remove all claims of a name that nobody will claim again; lowest first, so that none comes back."""
        for claim in sorted(self._all(), key=lambda claim: claim.generation):
            if claim.name == name:
                self._remove(claim)

    def remove_up_to(self, claim: Claim) -> None:
        """Remove this claim, which must be held here, and what it has replaced; a newer one stays."""
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
        holding = self.holding(claim)
        if holding is None:
            return self._watch.is_unchanged(self._folder / claim.file_name)
        return holding.replica is None or self._watch.is_gone(holding.replica)

    def _create(self, claim: Claim, replica: str | None) -> bool:
        path = self._folder / claim.file_name
        while True:
            temporary = temporary_path(path, unique_tag())
            try:
                temporary.write_text(json.dumps(asdict(Holding(replica, now_utc()))))
                return publish(temporary, path)
            except FileNotFoundError:
                if not self._folder.is_dir():
                    raise
                # Somebody has tidied it away between the two; again.
            except OSError:
                # Nobody would give back a claim of which its holder was told that it has failed.
                with contextlib.suppress(OSError):
                    if path.samefile(temporary):
                        path.unlink()
                raise
            finally:
                temporary.unlink(missing_ok=True)

    def _trim(self, claim: Claim) -> None:
        """Remove the claims that this one has replaced."""
        for other in self._all():
            if other.name == claim.name and other.generation < claim.generation:
                self._remove(other)

    def _remove(self, claim: Claim) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / claim.file_name).unlink()

    def _all(self) -> list[Claim]:
        return [
            Claim(match[1], int(match[2]))
            for path in self._folder.iterdir()
            if path.suffix != TEMPORARY_SUFFIX and (match := CLAIM_FILE.fullmatch(path.name))
        ]
