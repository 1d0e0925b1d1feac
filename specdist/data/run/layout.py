"""Where the files of a run lie. Sorted by path, the shards' data is in input order."""

from __future__ import annotations

import re
from pathlib import Path

from specdist.data.file_names import RECORD_FILE, SHARD_FILE, leases_in
from specdist.data.run.manifest import Manifest
from specdist.data.run.publishing import ShardPaths
from specdist.data.store.files import names_within


class RunLayout:
    """The names of a run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Of a stored run, the name of its files on each machine; a run begun anew has another.
        self.run_tag = ""

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

    def parts_path(self, shard: int, generation: int = 0) -> Path:
        """The log of the holder of this lease of the shard; generation 0 is that of a run without leases."""
        middle = f".{generation:05d}" if generation else ""
        return self.path / "parts" / f"shard-{shard:05d}{middle}.jsonl"

    def paths(self, shard: int) -> ShardPaths:
        return ShardPaths(
            data=self.data_path(shard),
            stats=self.stats_path(shard),
            trace=self.trace_path(shard),
            record=self.record_path(shard),
        )

    @property
    def leases_path(self) -> Path:
        """The folder of leases and heartbeats."""
        return leases_in(self.path)

    def files(self, kind: str, shard: int | None = None) -> list[tuple[Path, re.Match[str]]]:
        """The files of all shards, or of one of them, in one of :data:`SHARD_FOLDERS`, temporary ones too,
        sorted by name; by one listing."""
        folder = self.path / kind
        start = "shard-" if shard is None else f"shard-{shard:05d}."
        found = map(SHARD_FILE.fullmatch, sorted(names_within(folder, start)))
        return [(folder / match[0], match) for match in found if match]

    def logs(self, shard: int) -> dict[int, Path]:
        """The part logs of a shard by ascending generation of its lease, by one listing."""
        files = self.files("parts", shard)
        return dict(sorted((int(match[2] or 0), path) for path, match in files if path.suffix == ".jsonl"))

    def recorded_shards(self) -> set[int]:
        """The shards that have a completion record, by one listing: their data is not looked at."""
        names = names_within(self.path / "shards")
        return {int(match[1]) for name in names if (match := RECORD_FILE.fullmatch(name))}
