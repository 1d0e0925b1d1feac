"""Which replica works on what, in a folder shared by many nodes, without locks of the file system.

The claims of a name are files ``name.00001``, ``name.00002``, ...: the highest number is in force. A claim is
made, taken over or released by creating the next number, which the file server lets only one replica do. A
holder that was paused and lost its claim finds a higher number; its writes went to files with its own.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from specdist.data.files import publish, temporary_path, unique_tag
from specdist.data.heartbeat import Watch, now_utc
from specdist.utils.json_values import from_fields, parse_json

CLAIM_FILE = re.compile(r"([a-z]+(?:-\d{5})?)\.(\d{5,})")


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
    """The content of a claim's file. ``replica``: None if it was released; ``since``: for people."""

    replica: str | None
    since: str


class Claims:
    """The claims in a folder as one replica sees and makes them."""

    def __init__(self, folder: Path, replica: str, watch: Watch) -> None:
        self._folder = folder
        self._replica = replica
        self._watch = watch

    def latest(self) -> dict[str, Claim]:
        """The claim in force of every claimed name."""
        return {claim.name: claim for claim in self._all()}

    def holding(self, claim: Claim) -> Holding | None:
        """What the claim's file says; None if it is gone or damaged."""
        try:
            return from_fields(Holding, parse_json((self._folder / claim.file_name).read_bytes()))
        except (OSError, ValueError):
            return None

    def take(self, name: str, latest: Claim | None, *, above: int = 0) -> Claim | None:
        """Claim a name that is free or whose holder is gone; None if another replica holds it.

        Args:
            latest: the claim in force as last seen; the result is None if there is a newer one by now.
            above: the new generation is higher than this.
        """
        if latest is not None and not self._is_free(latest):
            return None
        claim = Claim(name, max(above, latest.generation if latest else 0) + 1)
        if not self._create(claim, self._replica):
            return None
        # ``latest`` may be out of date, and numbers below the claim in force free. If it is gone, all claims
        # were removed meanwhile, and numbers may have begun anew.
        if not self.is_held(claim) or (latest is not None and not self._is_there(latest)):
            self._remove(claim)
            return None
        self._trim(claim)
        return claim

    def is_held(self, claim: Claim) -> bool:
        """Whether a claim of this replica is still in force."""
        return self.latest().get(claim.name) == claim

    def release(self, claim: Claim) -> None:
        """Give the claim back if it is still in force. Raises nothing if the disk fails."""
        try:
            if self.is_held(claim):
                freed = Claim(claim.name, claim.generation + 1)
                if self._create(freed, None):
                    self._trim(freed)
        except OSError:
            # A full disk has no room for the next number, but a file can be removed.
            with contextlib.suppress(OSError):
                self._remove(claim)

    def forget(self, name: str) -> None:
        """Remove all claims of a name that will not be claimed again, the lowest first: the one in force
        stays in force until the end."""
        for claim in self._all():
            if claim.name == name:
                self._remove(claim)

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
                # Another replica's tidying removed the temporary file: try again.
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
        for other in self._all():
            if other.name == claim.name and other.generation < claim.generation:
                self._remove(other)

    def _remove(self, claim: Claim) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / claim.file_name).unlink()

    def _all(self) -> list[Claim]:
        """By ascending generation."""
        matches = [CLAIM_FILE.fullmatch(path.name) for path in self._folder.iterdir()]
        found = [Claim(match[1], int(match[2])) for match in matches if match]
        return sorted(found, key=lambda claim: claim.generation)
