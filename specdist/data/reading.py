"""The files of a finished shard, for those who only read them: whole as they were recorded, or refused."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from specdist.data.files import sha256_of
from specdist.data.publishing import ShardPaths, ShardRecord
from specdist.errors import UserError


def open_shard(paths: ShardPaths, *, verify: bool) -> pa.Table:
    """The rows of a finished shard, memory-mapped.

    With ``verify`` the whole file is compared with its recorded checksum, else no more than the number of its
    bytes and rows. Raises :class:`UserError` if it is not the file that was recorded.
    """
    record = ShardRecord.read(paths.record)
    try:
        if record is None or paths.data.stat().st_size != record.num_bytes:
            raise damaged(paths)
        if verify and sha256_of(paths.data).hex() != record.sha256:
            raise damaged(paths)
        table = pa.ipc.open_file(pa.memory_map(str(paths.data))).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(paths) from error
    if table.num_rows != record.num_rows:
        raise damaged(paths)
    return table


def read_shard_stats(paths: ShardPaths) -> dict[str, Any]:
    """The statistics of a finished shard. Raises :class:`UserError` if they cannot be read."""
    try:
        values = json.loads(paths.stats.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{paths.stats} cannot be read ({error}): {_remedy(paths)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{paths.stats} holds no statistics: {_remedy(paths)}")
    return values


def damaged(paths: ShardPaths) -> UserError:
    """What to say of a finished shard whose data is not what was recorded, or gone."""
    return UserError(
        f"{paths.data} is not the file that was recorded (damaged, or changed since?): {_remedy(paths)}"
    )


def _remedy(paths: ShardPaths) -> str:
    return (
        f"delete {paths.data} and {paths.record.name} beside it, and start the run's command again, which "
        "generates the shard anew; or bring the file back from a copy"
    )
