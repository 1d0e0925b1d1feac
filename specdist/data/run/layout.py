"""Where the files of a run lie. Sorted by path, the shards' data is in input order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdist.data.file_names import (
    DECISIONS,
    LEASES,
    RECORD_FILE,
    RUN_TAG,
    SHARD_FILE,
    leases_in,
)
from specdist.data.run.manifest import Manifest
from specdist.data.run.publishing import ShardPaths
from specdist.data.store.files import names_within


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
        # The manifest's info, once it is known.
        self._info: Mapping[str, Any] | None = None

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
        return self.path / "shards" / f"shard-{shard:05d}.arrow"

    def record_path(self, shard: int) -> Path:
        return self.path / "shards" / f"shard-{shard:05d}.json"

    def stats_path(self, shard: int) -> Path:
        return self.path / "stats" / f"shard-{shard:05d}.json"

    def trace_path(self, shard: int) -> Path:
        """Exists in runs with ``--trace``."""
        return self.path / "stats" / f"shard-{shard:05d}.trace.arrow"

    def parts_path(self, shard: int, generation: int = 0, sub_shard: int | None = None) -> Path:
        """The log of the holder of this lease of the shard, or of a sub-shard of it; generation 0 is that of
        a run without leases."""
        middle = f".{generation:05d}" if generation else ""
        if sub_shard is not None:
            middle = f".subshard-{sub_shard:05d}{middle}"
        return self.path / "parts" / f"shard-{shard:05d}{middle}.jsonl"

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
        return self.leases_path / f"{DECISIONS}-{self.run_tag}" / f"shard-{shard:05d}"

    @property
    def leases_path(self) -> Path:
        """The folder of leases and heartbeats."""
        leases: str | None = self._known(LEASES)
        return leases_in(self.path) if leases is None else Path(leases)

    @property
    def run_tag(self) -> str:
        """The name of a stored run's files on each machine; a run begun anew has another."""
        return str(self._known(RUN_TAG) or "")

    def _known(self, name: str) -> Any:
        """What the manifest's ``info`` says; None of a folder without one."""
        if self._info is None and self.manifest_path.exists():
            self.set_layout(self.manifest)
        return None if self._info is None else self._info.get(name)

    def set_layout(self, manifest: Manifest) -> None:
        """The layout of a run with this manifest, from now on."""
        self._info = manifest.info

    def files(self, kind: str, shard: int | None = None) -> list[tuple[Path, re.Match[str]]]:
        """The files of all shards, or of one of them, in one of :data:`SHARD_FOLDERS`, temporary ones too,
        sorted by name; by one listing."""
        folder = self.path / kind
        start = "shard-" if shard is None else f"shard-{shard:05d}."
        found = map(SHARD_FILE.fullmatch, sorted(names_within(folder, start)))
        return [(folder / match[0], match) for match in found if match]

    def logs(self, shard: int) -> list[LogFile]:
        """The part logs of a shard, by one listing: its own by ascending generation, then sub-shards'."""
        files = self.files("parts", shard)
        found = [
            LogFile(path, None if match[2] is None else int(match[2]), int(match[3] or 0))
            for path, match in files
            if path.suffix == ".jsonl"
        ]
        return sorted(found, key=lambda log: (-1 if log.sub_shard is None else log.sub_shard, log.generation))

    def recorded_shards(self) -> set[int]:
        """The shards that have a completion record, by one listing: their data is not looked at."""
        names = names_within(self.path / "shards")
        return {int(match[1]) for name in names if (match := RECORD_FILE.fullmatch(name))}
