"""Where leases and heartbeats lie: those of many shards, or of many replicas, in numbered folders, so that
none holds more than a few thousand files.

The folder of a shard's leases follows from its number, and is there while it holds any.
A replica's name ends with the number of the folder of its heartbeat, unless that is the folder of all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from specdist.data.store.files import names_in, names_within

BEAT_SUFFIX = ".beat"
REPLICAS_PREFIX = "replicas-"
LEASES_LEVEL, REPLICAS_LEVEL = re.compile(r"\d{5,}"), re.compile(rf"{REPLICAS_PREFIX}\d{{5,}}")
PLACE = re.compile(r"\.(\d{5,})")
MAX_REPLICAS_PER_FOLDER = 1000


def is_level(name: str) -> bool:
    """Whether this is the name of a numbered folder."""
    return bool(LEASES_LEVEL.fullmatch(name) or REPLICAS_LEVEL.fullmatch(name))


def listings(folder: Path) -> dict[str, list[str]]:
    """The names in the folder of leases, by ``""``, and in each numbered folder in it, by its name; one
    listing of each. Raises OSError."""
    found = {"": names_in(folder)}
    return found | {level: names_within(folder / level) for level in filter(is_level, found[""])}


def beat_folder(folder: Path, replica: str) -> Path:
    """The folder of a replica's heartbeat."""
    place = PLACE.search(replica)
    return folder if place is None else folder / f"{REPLICAS_PREFIX}{place[1]}"


def placed(folder: Path, replica: str) -> str:
    """The name of a replica that joins: with the number of the first folder that has room."""
    names = (f"{replica}.{number:05d}" if number else replica for number in itertools.count())
    return next(name for name in names if _num_beats(beat_folder(folder, name)) < MAX_REPLICAS_PER_FOLDER)


def replicas_in(folder: Path) -> list[str]:
    """The replicas that have a heartbeat, at work or not, ascending."""
    names = names_within(folder)
    for level in filter(REPLICAS_LEVEL.fullmatch, list(names)):
        names += names_within(folder / level)
    return replicas_among(names)


def replicas_among(names: Iterable[str]) -> list[str]:
    """Those whose heartbeats have these names, in order."""
    return sorted(name.removesuffix(BEAT_SUFFIX) for name in names if name.endswith(BEAT_SUFFIX))


def _num_beats(folder: Path) -> int:
    try:
        return sum(name.endswith(BEAT_SUFFIX) for name in names_within(folder))
    except OSError:
        # Joining tells what is wrong with the folder.
        return 0
