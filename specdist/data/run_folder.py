"""The folder of a run: what is finished, what is half done, and how a shard goes from one to the other.

Order of truth of a shard: data file, statistics, trace, completion record, each durable before the next; only
then does its part log go. So after a crash at any moment a shard is complete, or redone from its part log.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.ipc

from specdist.data.files import (
    TEMPORARY_SUFFIX,
    fsync_folder,
    sha256_of,
    temporary_path,
    write_atomically,
    write_json,
)
from specdist.data.lock import LOCK_NAME
from specdist.data.manifest import Manifest, check_same
from specdist.data.parts import PartLog
from specdist.errors import UserError

ROWS_PER_BATCH = 1024
SHARD_FOLDERS = ("shards", "stats", "parts")
SHARD_FILE = re.compile(r"shard-(\d{5})\.(arrow|trace\.arrow|json|jsonl)(\.tmp)?")


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The completion record: what the shard's Arrow file must be."""

    num_rows: int
    num_bytes: int
    sha256: str


class RunFolder:
    """A run's files. :meth:`open` creates or resumes a run; ``RunFolder(path)`` changes nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open(path: Path, manifest: Manifest, config_yaml: str, overwrite: bool) -> RunFolder:
        """Create the folder, or resume the run that it holds if it has the same manifest.

        With ``overwrite`` that run's files are deleted first, and no others (``logs/`` stays). A resumed run
        keeps its manifest, with the ``info`` of its start, and gets the new ``config.yaml``. Raises
        :class:`UserError` if the folder holds another run or other files, or cannot be written.
        """
        folder = RunFolder(path)
        try:
            folder._claim(manifest, overwrite)
            write_atomically(folder.config_path, lambda file: file.write(config_yaml.encode()))
            folder._tidy()
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error}") from error
        return folder

    @property
    def manifest(self) -> Manifest:
        """The manifest in force. Raises :class:`UserError` if there is none that can be read."""
        return Manifest.read(self.manifest_path)

    def freeze(self, name: str, value: Any) -> None:
        """Add what was measured at the start to the manifest's ``info``, for restarts to repeat."""
        manifest = self.manifest
        replace(manifest, info={**manifest.info, name: value}).write(self.manifest_path)

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

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
        """Of a run with ``--trace``."""
        return self.path / "stats" / f"shard-{shard:05d}.trace.arrow"

    def parts_path(self, shard: int) -> Path:
        return self.path / "parts" / f"shard-{shard:05d}.jsonl"

    def is_complete(self, shard: int) -> bool:
        """Whether the shard has a completion record, statistics, and data of the recorded size."""
        try:
            record = ShardRecord(**json.loads(self.record_path(shard).read_bytes()))
            size = self.data_path(shard).stat().st_size
        except (OSError, ValueError, TypeError):
            return False
        return size == record.num_bytes and self.stats_path(shard).is_file()

    def parts(self, shard: int) -> PartLog:
        """The log of the shard's finished rows, open for appending; close it before :meth:`finish_shard`."""
        return PartLog(self.parts_path(shard))

    def finish_shard(
        self, shard: int, table: pa.Table, stats: dict[str, Any], trace: pa.Table | None = None
    ) -> None:
        """Write a shard's output, statistics and trace, record that it is complete, and drop its part log.

        The same tables and statistics give the same bytes, so it can be called again after a crash.
        """
        self._write_data(shard, table)
        self._write_stats(shard, stats)
        if trace is not None:
            self._write_trace(shard, trace)
        self._write_record(shard, table.num_rows)
        self._remove_parts(shard)

    def shard_stats(self) -> list[dict[str, Any]]:
        """The statistics of all complete shards, in the order of the shards."""
        shards = sorted({shard for _, shard in self._shard_files()})
        return [
            json.loads(self.stats_path(shard).read_bytes()) for shard in shards if self.is_complete(shard)
        ]

    def _write_data(self, shard: int, table: pa.Table) -> None:
        self._write_table(self.data_path(shard), table)

    def _write_trace(self, shard: int, trace: pa.Table) -> None:
        self._write_table(self.trace_path(shard), trace)

    @staticmethod
    def _write_table(path: Path, table: pa.Table) -> None:
        # The file format allows one dictionary per column.
        options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)

        def write(file: BinaryIO) -> None:
            with pa.ipc.new_file(file, table.schema, options=options) as writer:
                writer.write_table(table.combine_chunks(), max_chunksize=ROWS_PER_BATCH)

        write_atomically(path, write)

    def _write_stats(self, shard: int, stats: dict[str, Any]) -> None:
        write_json(self.stats_path(shard), stats)

    def _write_record(self, shard: int, num_rows: int) -> None:
        data_path = self.data_path(shard)
        record = ShardRecord(
            num_rows=num_rows, num_bytes=data_path.stat().st_size, sha256=sha256_of(data_path).hex()
        )
        write_json(self.record_path(shard), asdict(record))

    def _remove_parts(self, shard: int) -> None:
        self.parts_path(shard).unlink(missing_ok=True)
        fsync_folder(self.parts_path(shard).parent)

    def _claim(self, manifest: Manifest, overwrite: bool) -> None:
        """Make the folder that of a run with this manifest, or refuse."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--output {self.path} is a file: give a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        has_run = self.manifest_path.exists()
        if has_run:
            old = self.manifest
            # Refused before its first row, perhaps for the size of its cache: nothing would be lost.
            has_no_rows = not self._shard_files()
            if not overwrite and not has_no_rows:
                check_same(old, manifest)
            if has_no_rows and old.fingerprint != manifest.fingerprint:
                manifest.write(self.manifest_path)
        else:
            self._check_empty()
            # First of all: a folder that holds anything else but no manifest is refused.
            manifest.write(self.manifest_path)
        for name in (*SHARD_FOLDERS, "logs"):
            (self.path / name).mkdir(exist_ok=True)
        if has_run and overwrite:
            self._delete_run_files()
            manifest.write(self.manifest_path)
        fsync_folder(self.path)

    def _check_empty(self) -> None:
        """A launcher may have made the logs' folder, and a crash may have left the start of a manifest."""
        harmless = {self.logs_path.name, LOCK_NAME, temporary_path(self.manifest_path).name}
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in harmless)
        if others:
            shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            raise UserError(
                f"--output {self.path} is not empty and not the folder of a run (no manifest.json; it holds "
                f"{shown}): give a new folder. --overwrite deletes only what a run has written"
            )

    def _shard_files(self) -> list[tuple[Path, int]]:
        """Every file of a shard, temporary ones too, with the shard's number; records come first."""
        return [
            (path, int(match[1]))
            for pattern in ("shards/*.json*", "shards/*.arrow*", "stats/*", "parts/*")
            for path in sorted(self.path.glob(pattern))
            if (match := SHARD_FILE.fullmatch(path.name))
        ]

    def _delete_run_files(self) -> None:
        """Delete results, durably before the new manifest claims them.

        The old manifest stays until it is replaced in one step: without one the folder would be nobody's.
        """
        for path, _ in self._shard_files():
            path.unlink()
        for name in SHARD_FOLDERS:
            fsync_folder(self.path / name)

    def _tidy(self) -> None:
        """Remove what a crash left: temporary files, part logs of the finished, records of the unfinished."""
        for path in (self.manifest_path, self.config_path):
            temporary_path(path).unlink(missing_ok=True)
        for path, shard in self._shard_files():
            is_stale_record = path == self.record_path(shard) and not self.is_complete(shard)
            is_done_log = path == self.parts_path(shard) and self.is_complete(shard)
            if path.suffix == TEMPORARY_SUFFIX or is_stale_record or is_done_log:
                path.unlink()
