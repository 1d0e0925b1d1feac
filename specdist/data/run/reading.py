"""Reading the files of finished shards, compared with their records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from specdist.data.run.layout import RunLayout
from specdist.data.run.publishing import ShardPaths, ShardRecord
from specdist.data.store.storage import local_copy
from specdist.utils.errors import UserError

# Up to this size a file is read in one go: that takes less time than to map it.
SMALL_BYTES = 2**16
# An Arrow file begins with its name, which is filled up to these.
MAGIC_BYTES = 8
# More small files would only take longer to open.
MAX_TRACES = 2000


def open_shard(paths: ShardPaths, *, verify: bool) -> pa.Table:
    """The rows of a finished shard, memory-mapped; of one on a store, from a copy of it.

    With ``verify`` the file is compared with its recorded checksum, else only with the recorded numbers of
    bytes and rows. Raises :class:`UserError` if they differ.
    """
    if verify:
        return verified_shard(paths)
    record = ShardRecord.read(paths.record)
    try:
        with local_copy(paths.data) as data:
            if record is None or data.stat().st_size != record.num_bytes:
                raise damaged(paths)
            table = pa.ipc.open_file(pa.memory_map(str(data))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise damaged(paths) from error
    if table.num_rows != record.num_rows:
        raise damaged(paths)
    return table


def verified_shard(paths: ShardPaths) -> pa.Table:
    """The rows of a finished shard whose data has its recorded checksum; a large file is memory-mapped.
    Raises :class:`UserError` if the data does not match its record."""
    try:
        with local_copy(paths.data) as data:
            content = _content(data)
        found = len(content), hashlib.sha256(content).hexdigest()
        record = ShardRecord.read(paths.record)
        if record is None or (record.num_bytes, record.sha256) != found:
            raise damaged(paths)
        if len(content) <= SMALL_BYTES:
            # Between its magic and its footer the file has the stream's format, which opens faster.
            table = pa.ipc.open_stream(pa.py_buffer(content).slice(MAGIC_BYTES)).read_all()
        else:
            table = pa.ipc.open_file(content).read_all()
    except (OSError, pa.ArrowException) as error:
        raise damaged(paths) from error
    if table.num_rows != record.num_rows:
        raise damaged(paths)
    return table


def _content(path: Path) -> bytes | pa.Buffer:
    """All bytes of a file: of a small one read, of another mapped."""
    with path.open("rb", buffering=0) as file:
        content = file.read(SMALL_BYTES + 1)
    return content if len(content) <= SMALL_BYTES else pa.memory_map(str(path)).read_buffer()


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """These columns of an Arrow file, in the file's order; the others are not read."""
    with local_copy(path) as copy, pa.memory_map(str(copy)) as source:
        known = pa.ipc.open_file(source).schema.names
        options = pa.ipc.IpcReadOptions(included_fields=[known.index(name) for name in names])
        return pa.ipc.open_file(source, options=options).read_all()


def traces_to_read(layout: RunLayout, shards: Iterable[int], max_bytes: int) -> tuple[list[Path], int]:
    """Those of these shards' traces that are read for a picture: all, or evenly spread ones of at most about
    ``max_bytes`` and :data:`MAX_TRACES`; and how many traces there are."""
    sizes = layout.sizes_of_traces()
    traced = sorted(sizes.keys() & set(shards))
    num_bytes = sum(sizes[shard] for shard in traced)
    step = max(1, -(-num_bytes // max_bytes), -(-len(traced) // MAX_TRACES))
    return [layout.trace_path(shard) for shard in traced[::step]], len(traced)


def damaged(paths: ShardPaths) -> UserError:
    """The error for a finished shard whose data is missing or does not match its record."""
    return UserError(
        f"{paths.data} is missing, damaged, or has changed since it was recorded: delete it and "
        f"{paths.record.name} beside it, and start the run's command again, which generates the shard again; "
        "or restore the file from a backup"
    )
