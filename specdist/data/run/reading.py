"""Reading the files of finished shards, compared with their records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from specdist.data.run.publishing import ShardPaths, ShardRecord
from specdist.data.store.storage import local_copy
from specdist.utils.errors import UserError


def open_shard(paths: ShardPaths, *, verify: bool) -> pa.Table:
    """The rows of a finished shard, memory-mapped; of one on a store, from a copy of it.

    With ``verify`` the file is compared with its recorded checksum, else only with the recorded numbers of
    bytes and rows. Raises :class:`UserError` if they differ.
    """
    record = ShardRecord.read(paths.record)
    try:
        with local_copy(paths.data) as data:
            content = pa.memory_map(str(data)).read_buffer()
            table = pa.ipc.open_file(content).read_all()
    except (OSError, pa.ArrowException) as error:
        raise damaged(paths) from error
    if record is None or (content.size, table.num_rows) != (record.num_bytes, record.num_rows):
        raise damaged(paths)
    if verify and hashlib.sha256(content).hexdigest() != record.sha256:
        raise damaged(paths)
    return table


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """These columns of an Arrow file, in the file's order; the others are not read."""
    with local_copy(path) as copy, pa.memory_map(str(copy)) as source:
        known = pa.ipc.open_file(source).schema.names
        options = pa.ipc.IpcReadOptions(included_fields=[known.index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def damaged(paths: ShardPaths) -> UserError:
    """The error for a finished shard whose data is missing or does not match its record."""
    return UserError(
        f"{paths.data} is missing, damaged, or has changed since it was recorded: delete it and "
        f"{paths.record.name} beside it, and start the run's command again, which generates the shard again; "
        "or restore the file from a backup"
    )
