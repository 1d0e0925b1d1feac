"""Where the files of a run lie.

A run of many shards has their files in numbered folders, so that none holds more than a few thousand; which
shards share a folder is in the manifest's ``info``. Sorted by path, the shards' data is in input order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.data.run.manifest import Manifest
from specdist.data.run.publishing import ShardPaths
from specdist.data.store.files import fsync_folder, names_within, sizes_in

SHARD_FOLDERS = ("shards", "stats", "parts")
SHARD_FILE = re.compile(
    r"shard-(\d{5,})(?:\.arrow|\.trace\.arrow|\.json|(?:(?:\.subshard-(\d{5,}))?\.(\d{5,}))?\.jsonl)"
    r"(?:(?:\.[\w-]+)?\.tmp)?"
)
DATA_FILE = re.compile(r"shard-(\d{5,})\.arrow")
TRACE_FILE = re.compile(r"shard-(\d{5,})\.trace\.arrow")
# Completion records and statistics have the same names, in different folders.
RECORD_FILE = re.compile(r"shard-(\d{5,})\.json")
NUMBERED_FOLDER = re.compile(r"\d{5,}")
# Of a numbered folder's shards: their summed statistics once all are complete; those of some while not all
# are; and figures of each of these: see specdist.data.stats.figures.
TOTAL, SUBTOTAL, FIGURES = "total", "subtotal", "figures"
SUMS = (TOTAL, SUBTOTAL, FIGURES)
# In the manifest's ``info``, if the shards lie in numbered folders.
SHARDS_PER_FOLDER = "shards_per_folder"
RUN_TAG = "run_tag"
# Begins the names of objects with which a replica tries out a store; one that is killed leaves its own.
PROBE = "specdist-probe"
# The folder of leases and heartbeats, if it is not in the run's own (``--leases``); and in it, by the run's
# tag, which data was chosen for each shard.
LEASES, LEASES_FOLDER, DECISIONS = "leases", "leases", "chosen"
# Up to so many lie in one folder, without a number.
MAX_SHARDS_PER_FOLDER = 1000
# In the manifest's ``info``, if leases lie in numbered folders, too (in older runs they do not): of so many
# shards each, since replicas list all of them, and few of the shards have leases at a time.
SHARDS_PER_LEASE_FOLDER, MAX_SHARDS_PER_LEASE_FOLDER = "shards_per_lease_folder", 4000


def layout_info(num_shards: int) -> dict[str, Any]:
    """What the manifest's ``info`` says about the layout of a new run."""
    if num_shards <= MAX_SHARDS_PER_FOLDER:
        return {}
    return {SHARDS_PER_FOLDER: MAX_SHARDS_PER_FOLDER, SHARDS_PER_LEASE_FOLDER: MAX_SHARDS_PER_LEASE_FOLDER}


def leases_in(output: Path) -> Path:
    """The folder of leases and heartbeats in an output's own."""
    return output / LEASES_FOLDER


def data_pattern(info: Mapping[str, Any]) -> str:
    """A glob pattern of all shards' data in a run with this ``info``, relative to its folder."""
    return "shards/*/shard-*.arrow" if SHARDS_PER_FOLDER in info else "shards/shard-*.arrow"


def trace_pattern(info: Mapping[str, Any]) -> str:
    """The same of the shards' traces."""
    return data_pattern(info).replace("shards/", "stats/", 1).replace(".arrow", ".trace.arrow")


@dataclass(frozen=True)
class LogFile:
    """A part log: of the lease of this generation of a shard, or of a sub-shard of it."""

    path: Path
    sub_shard: int | None
    generation: int


class RunLayout:
    """The names of a run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of the manifest, once it is known.
        self._info: Mapping[str, Any] | None = None
        # Groups whose folders are known to be there: they are never removed.
        self._made = set[str]()
        self._places: dict[tuple[str, int | None], Path] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest in force. Raises :class:`UserError` if it is missing or damaged."""
        return Manifest.read(self.manifest_path)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def card_path(self) -> Path:
        """The card of a complete run: see :mod:`specdist.job.totals.card`."""
        return self.path / "README.md"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def data_path(self, shard: int) -> Path:
        return self._place("shards", shard) / f"shard-{shard:05d}.arrow"

    def record_path(self, shard: int) -> Path:
        return self._place("shards", shard) / f"shard-{shard:05d}.json"

    def stats_path(self, shard: int) -> Path:
        return self._place("stats", shard) / f"shard-{shard:05d}.json"

    def trace_path(self, shard: int) -> Path:
        """Exists in runs with ``--trace``."""
        return self._place("stats", shard) / f"shard-{shard:05d}.trace.arrow"

    def parts_path(self, shard: int, generation: int = 0, sub_shard: int | None = None) -> Path:
        """The log of the holder of this lease of the shard, or of a sub-shard of it; generation 0 is that of
        a run without leases."""
        middle = f".{generation:05d}" if generation else ""
        if sub_shard is not None:
            middle = f".subshard-{sub_shard:05d}{middle}"
        return self._place("parts", shard) / f"shard-{shard:05d}{middle}.jsonl"

    def paths(self, shard: int) -> ShardPaths:
        return ShardPaths(
            data=self.data_path(shard),
            stats=self.stats_path(shard),
            trace=self.trace_path(shard),
            record=self.record_path(shard),
            decision=self._decision(shard),
        )

    def _decision(self, shard: int) -> Path | None:
        if self._known(LEASES) is None:
            return None
        folder = self.leases_path / f"{DECISIONS}-{self.run_tag}"
        return folder / f"{shard // MAX_SHARDS_PER_FOLDER:05d}" / f"shard-{shard:05d}"

    @property
    def leases_path(self) -> Path:
        """The folder of leases and heartbeats."""
        leases: str | None = self._known(LEASES)
        return leases_in(self.path) if leases is None else Path(leases)

    @property
    def shards_per_folder(self) -> int | None:
        """None if all shards lie in one folder. Raises :class:`UserError` as :attr:`manifest` does."""
        size: int | None = self._known(SHARDS_PER_FOLDER)
        return size

    @property
    def run_tag(self) -> str:
        """Of a run on a store: names its files on each machine, so that a run begun anew has others."""
        return str(self._known(RUN_TAG) or "")

    def _known(self, name: str) -> Any:
        """What the manifest's ``info`` says; None of a folder without one."""
        if self._info is None and self.manifest_path.exists():
            self.set_layout(self.manifest)
        return None if self._info is None else self._info.get(name)

    def set_layout(self, manifest: Manifest) -> None:
        """The layout of a run with this manifest, from now on."""
        self._info = manifest.info

    def group_of(self, shard: int) -> str:
        """The name of the numbered folder of a shard; empty if there are no such folders."""
        size = self.shards_per_folder
        return "" if size is None else f"{shard // size:05d}"

    def by_group(self, shards: Iterable[int]) -> dict[str, list[int]]:
        """These shards by the name of their group, groups in order."""
        size = self.shards_per_folder
        found: dict[int, list[int]] = {}
        for shard in shards:
            found.setdefault(0 if size is None else shard // size, []).append(shard)
        return {self.group_of(found[number][0]): found[number] for number in sorted(found)}

    def leases_level(self, shard: int) -> str:
        """The name of the numbered folder of a shard's leases; empty if there are no such folders."""
        size = self._known(SHARDS_PER_LEASE_FOLDER)
        return "" if size is None else f"{shard // size:05d}"

    def shards_of(self, group: str, num_shards: int) -> range:
        """The shards of a group, in a run of so many."""
        size = self.shards_per_folder
        return range(num_shards) if size is None else range(num_shards)[int(group) * size :][:size]

    def groups(self) -> list[str]:
        """The groups of shards that have a folder, in order."""
        if self.shards_per_folder is None:
            return [""]
        names = {name for kind in SHARD_FOLDERS for name in names_within(self.path / kind)}
        return sorted(filter(NUMBERED_FOLDER.fullmatch, names))

    def sum_path(self, kind: str, group: str) -> Path:
        """A group's file of one of the kinds of :data:`SUMS`."""
        return self.path / "stats" / f"{kind}-{group}.json"

    def groups_with(self, kind: str) -> set[str]:
        """The groups that have such a file, by one listing."""
        if self.shards_per_folder is None:
            return set()
        file = re.compile(rf"{kind}-(\d{{5,}})\.json")
        return {match[1] for name in names_within(self.path / "stats") if (match := file.fullmatch(name))}

    def make_folders(self, shard: int) -> None:
        """The numbered folders of a shard, durably. Raises OSError."""
        if self.shards_per_folder is None or self.group_of(shard) in self._made:
            return
        for kind in SHARD_FOLDERS:
            folder = self._place(kind, shard)
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                fsync_folder(folder.parent)
        self._made.add(self.group_of(shard))

    def files(self, kind: str, group: str, shard: int | None = None) -> list[tuple[Path, re.Match[str]]]:
        """The files of a group's shards, or of one of them, in one of :data:`SHARD_FOLDERS`, temporary ones
        too, sorted by name; by one listing."""
        folder = self.path / kind / group
        start = "shard-" if shard is None else f"shard-{shard:05d}."
        found = map(SHARD_FILE.fullmatch, sorted(names_within(folder, start)))
        return [(folder / match[0], match) for match in found if match]

    def logs(self, shard: int) -> list[LogFile]:
        """The part logs of a shard, by one listing: its own by ascending generation, then sub-shards'."""
        files = self.files("parts", self.group_of(shard), shard)
        found = [
            LogFile(path, None if match[2] is None else int(match[2]), int(match[3] or 0))
            for path, match in files
            if path.suffix == ".jsonl"
        ]
        return sorted(found, key=lambda log: (-1 if log.sub_shard is None else log.sub_shard, log.generation))

    def recorded_in(self, group: str) -> set[int]:
        """The shards of a group that have a completion record, by one listing."""
        return self._with_record_name("shards", group)

    def with_stats_in(self, group: str) -> set[int]:
        """The shards of a group that have statistics, by one listing."""
        return self._with_record_name("stats", group)

    def _with_record_name(self, kind: str, group: str) -> set[int]:
        names = names_within(self.path / kind / group)
        return {int(match[1]) for name in names if (match := RECORD_FILE.fullmatch(name))}

    def sizes_of_data(self, group: str) -> dict[int, int]:
        """Bytes of the data of a group's shards; on a store by one listing."""
        return self._sizes("shards", group, DATA_FILE)

    def sizes_of_traces(self, group: str) -> dict[int, int]:
        """The same of their traces; no other shard has one."""
        return self._sizes("stats", group, TRACE_FILE)

    def _sizes(self, kind: str, group: str, name: re.Pattern[str]) -> dict[int, int]:
        return {int(match[1]): size for match, size in sizes_in(self.path / kind / group, name)}

    def _place(self, kind: str, shard: int) -> Path:
        # Not by the group's name, which takes longer to write than everything else here.
        size = self.shards_per_folder
        key = kind, None if size is None else shard // size
        if key not in self._places:
            self._places[key] = self.path / kind / self.group_of(shard)
        return self._places[key]
