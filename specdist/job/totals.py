"""Sums of finished shards' statistics: of a run with many shards, a file for each of its numbered folders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specdist.data import RunFolder
from specdist.data.files import sealed, unsealed, write_json, writing
from specdist.data.publishing import ShardRecord
from specdist.data.storage import in_parallel
from specdist.stats.shard import Stats
from specdist.utils.json_values import parse_object


@dataclass
class Total:
    """Of some finished shards.

    Attributes:
        num_rows: in their data files: completions and errors.
        error_shards: those that have rows with an error.
    """

    stats: Stats = field(default_factory=Stats)
    num_rows: int = 0
    error_shards: list[int] = field(default_factory=list)

    def add(self, other: Total) -> None:
        self.stats.add(other.stats)
        self.num_rows += other.num_rows
        self.error_shards += other.error_shards

    def to_json(self) -> dict[str, Any]:
        return {
            "num_output_rows": self.num_rows,
            "error_shards": self.error_shards,
            "stats": self.stats.to_json(),
        }


def write_total(folder: RunFolder, shard: int, num_shards: int) -> None:
    """If this shard's numbered folder is complete now, write its total. Raises :class:`UserError` if the disk
    fails, or if a file is damaged."""
    group = folder.group_of(shard)
    if not group:
        return
    shards = folder.shards_of(group, num_shards)
    if folder.recorded_in(group).issuperset(shards):
        with writing(folder.total_path(group)):
            write_json(folder.total_path(group), sealed(_of_shards(folder, shards).to_json()))


def total_of(folder: RunFolder, shards: Iterable[int]) -> Total:
    """Of these finished shards, from the totals of the folders that are among them whole. Raises
    :class:`UserError` for damaged statistics."""
    left = set(shards)
    total = Total()
    num_shards = folder.plan().num_shards if left else 0
    for group in sorted(folder.totalled_groups()):
        members = folder.shards_of(group, num_shards)
        if left.issuperset(members) and (found := _read(folder, group)) is not None:
            total.add(found)
            left.difference_update(members)
    total.add(_of_shards(folder, sorted(left)))
    return total


def _of_shards(folder: RunFolder, shards: Iterable[int]) -> Total:
    total = Total()
    for found in in_parallel(folder.path, lambda shard: _of_shard(folder, shard), shards):
        total.add(found)
    return total


def _of_shard(folder: RunFolder, shard: int) -> Total:
    stats = Stats.from_json(folder.read_stats(shard))
    record = ShardRecord.read(folder.record_path(shard))
    return Total(stats, 0 if record is None else record.num_rows, [shard] if stats.num_error_rows else [])


def _read(folder: RunFolder, group: str) -> Total | None:
    """None if the file is missing or damaged: what it sums is still there."""
    try:
        values = unsealed(parse_object(folder.total_path(group).read_bytes()))
        return Total(
            Stats.from_json(values["stats"]), int(values["num_output_rows"]), list(values["error_shards"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
