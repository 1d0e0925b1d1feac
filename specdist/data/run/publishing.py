"""How a finished shard gets its final names, exactly once even if several replicas finish it.

Each replica writes the shard's files durably under names of its own: an *attempt*. Then the data's final name
is created, which only one attempt can do. Its statistics, trace and completion record follow; after a crash,
any replica finds them by the data's digest and goes on.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.ipc

from specdist.data.store.files import (
    TEMPORARY_SUFFIX,
    fsync_folder,
    json_bytes,
    move,
    publish,
    sealed,
    sha256_of,
    temporary_path,
    write_durably,
)
from specdist.data.store.object_store import StoreError
from specdist.data.store.storage import cached
from specdist.utils.json_values import parse_fields

ROWS_PER_BATCH = 1024


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The completion record: what the shard's Arrow file must match."""

    num_rows: int
    num_bytes: int
    sha256: str

    @staticmethod
    def read(path: Path) -> ShardRecord | None:
        """Read a completion record; None if the file is missing or damaged. Raises :class:`StoreError` if a
        store does not tell."""
        try:
            return parse_fields(ShardRecord, path.read_bytes())
        except StoreError:
            raise
        except (OSError, ValueError):
            return None


@dataclass(frozen=True, kw_only=True)
class ShardPaths:
    """The final names of a shard's files, in the order in which they appear."""

    data: Path
    stats: Path
    trace: Path
    record: Path

    def all(self) -> tuple[Path, ...]:
        return self.data, self.stats, self.trace, self.record

    @property
    def needed(self) -> tuple[Path, ...]:
        """The files that a complete shard has."""
        return self.data, self.stats, self.record

    def is_complete(self) -> bool:
        """Whether there is a completion record, statistics, and data of the recorded size."""
        record = ShardRecord.read(self.record)
        try:
            return (
                record is not None and self.data.stat().st_size == record.num_bytes and self.stats.is_file()
            )
        except StoreError:
            raise
        except OSError:
            return False


class Attempt:
    """One replica's files of a shard, under names that carry its tag."""

    def __init__(self, paths: ShardPaths, tag: str) -> None:
        self._paths = paths
        self._tag = tag

    def write(self, table: pa.Table, stats: dict[str, Any], trace: pa.Table | None) -> bool:
        """Write all files; the same tables and statistics give the same bytes.

        False if files were removed meanwhile: another replica completed the shard. Raises OSError, and leaves
        no file, if the disk fails.
        """
        try:
            self._write(table, stats, trace)
        except OSError as error:
            self.discard()
            if isinstance(error, FileNotFoundError) and self._paths.data.parent.is_dir():
                return False
            raise
        return True

    def _write(self, table: pa.Table, stats: dict[str, Any], trace: pa.Table | None) -> None:
        paths = self._paths
        self._write_table(paths.data, table)
        write_durably(self._own(paths.stats), lambda file: file.write(json_bytes(sealed(stats))))
        if trace is not None:
            self._write_table(paths.trace, trace)
        data = self._own(paths.data)
        record = ShardRecord(
            num_rows=table.num_rows, num_bytes=data.stat().st_size, sha256=sha256_of(data).hex()
        )
        write_durably(self._own(paths.record), lambda file: file.write(json_bytes(asdict(record))))
        for folder in {path.parent for path in paths.all()}:
            fsync_folder(folder)

    def publish_data(self) -> bool:
        """False if another attempt's data was published, or this attempt's was removed."""
        try:
            return publish(self._own(self._paths.data), self._paths.data)
        except FileNotFoundError:
            return False

    def replace_data(self) -> bool:
        """Replace data that belongs to no attempt; False if this attempt's data is gone."""
        try:
            move(self._own(self._paths.data), self._paths.data)
        except FileNotFoundError:
            return False
        fsync_folder(self._paths.data.parent)
        return True

    def publish_stats(self) -> None:
        self._rename(self._paths.stats)

    def publish_trace(self) -> None:
        self._rename(self._paths.trace)

    def publish_record(self) -> None:
        """Write the completion record: after this the shard is complete."""
        self._rename(self._paths.record)

    def finish(self) -> None:
        """Publish everything after the data."""
        self.publish_stats()
        self.publish_trace()
        self.publish_record()
        if self._own(self._paths.data).parent != self._paths.data.parent:
            self._own(self._paths.data).unlink(missing_ok=True)

    def discard(self) -> None:
        for path in self._paths.all():
            self._own(path).unlink(missing_ok=True)

    @staticmethod
    def that_won(paths: ShardPaths) -> Attempt | None:
        """The attempt whose data was published, if its record was not yet."""
        try:
            num_bytes = paths.data.stat().st_size
        except StoreError:
            raise
        except OSError:
            return None
        digest = None
        for path in sorted(paths.record.parent.glob(f"{paths.record.name}.*{TEMPORARY_SUFFIX}")):
            record = ShardRecord.read(path)
            if record is not None and record.num_bytes == num_bytes:
                digest = digest or sha256_of(paths.data).hex()
                if record.sha256 == digest:
                    return Attempt(paths, path.name[len(paths.record.name) + 1 : -len(TEMPORARY_SUFFIX)])
        return None

    def _own(self, path: Path) -> Path:
        own = temporary_path(path, self._tag)
        # Data travels to a store once, when it gets its name there.
        return cached(own) if path == self._paths.data else own

    def _rename(self, path: Path) -> None:
        # Not found: another replica went on with this attempt.
        with contextlib.suppress(FileNotFoundError):
            self._own(path).replace(path)
        fsync_folder(path.parent)

    def _write_table(self, path: Path, table: pa.Table) -> None:
        write_durably(self._own(path), lambda file: write_table(file, table))


def write_table(file: BinaryIO, table: pa.Table) -> None:
    """Write a table as an Arrow file. Raises ``pa.ArrowException`` for a type that it cannot hold."""
    # The file format allows one dictionary per column.
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=ROWS_PER_BATCH)
