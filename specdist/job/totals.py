"""Sums of finished shards' statistics: of a run with many shards, a file for each of its numbered folders;
and of a folder with unfinished shards one that says which of them it sums, written from time to time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdist.data import RunFolder
from specdist.data.files import sealed, unsealed, write_json, writing
from specdist.data.publishing import ShardRecord
from specdist.data.storage import in_parallel
from specdist.stats.shard import Stats
from specdist.utils.json_values import parse_object

# A subtotal is written when a shard with a multiple of this number is finished.
SHARDS_PER_SUBTOTAL = 64
SHARDS = "shards"


@dataclass
class Total:
    """Of some finished shards.

    Attributes:
        num_rows: in their data files: completions and errors.
        error_shards: those that have rows with an error.
        shards: of a subtotal, those that it sums.
    """

    stats: Stats = field(default_factory=Stats)
    num_rows: int = 0
    error_shards: list[int] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)

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
    """If this shard's numbered folder is complete now, write its total; if not, from time to time the sum of
    those that are finished. Raises :class:`UserError` if the disk fails, or if a file is damaged."""
    group = folder.group_of(shard)
    if not group:
        return
    shards = folder.shards_of(group, num_shards)
    recorded = folder.recorded_in(group)
    subtotal = folder.subtotal_path(group)
    if recorded.issuperset(shards):
        with writing(folder.total_path(group)):
            write_json(folder.total_path(group), sealed(_of_group(folder, group, recorded).to_json()))
            subtotal.unlink(missing_ok=True)
    elif shard % SHARDS_PER_SUBTOTAL == 0:
        total = _of_group(folder, group, recorded)
        with writing(subtotal):
            write_json(subtotal, sealed({SHARDS: sorted(recorded)} | total.to_json()))


def total_of(folder: RunFolder, shards: Iterable[int]) -> Total:
    """Of these finished shards, from the totals of the folders that are among them whole, and the subtotals
    of others. Raises :class:`UserError` for damaged statistics."""
    left = set(shards)
    total = Total()
    num_shards = folder.plan().num_shards if left else 0
    totalled = folder.totalled_groups()
    for group in sorted(totalled):
        members = folder.shards_of(group, num_shards)
        if left.issuperset(members) and (found := _read(folder.total_path(group))) is not None:
            total.add(found)
            left.difference_update(members)
    for group in sorted({folder.group_of(shard) for shard in left} - totalled - {""}):
        mine = left.intersection(folder.shards_of(group, num_shards))
        total.add(_of_group(folder, group, mine))
        left -= mine
    total.add(_of_shards(folder, sorted(left)))
    return total


def subtotalled(folder: RunFolder, group: str) -> set[int]:
    """The shards of a group that its subtotal sums, all of which were complete then."""
    return set(_subtotal(folder, group).shards)


def _of_group(folder: RunFolder, group: str, shards: set[int]) -> Total:
    """Of these shards of a group, with its subtotal if it is of shards among them."""
    total = _subtotal(folder, group)
    if not shards.issuperset(total.shards):
        total = Total()
    total.add(_of_shards(folder, sorted(shards.difference(total.shards))))
    return total


def _subtotal(folder: RunFolder, group: str) -> Total:
    """Of no shards where none can be read."""
    return _read(folder.subtotal_path(group)) or Total()


def _of_shards(folder: RunFolder, shards: Iterable[int]) -> Total:
    total = Total()
    for found in in_parallel(folder.path, lambda shard: _of_shard(folder, shard), shards):
        total.add(found)
    return total


def _of_shard(folder: RunFolder, shard: int) -> Total:
    stats = Stats.from_json(folder.read_stats(shard))
    record = ShardRecord.read(folder.record_path(shard))
    return Total(stats, 0 if record is None else record.num_rows, [shard] if stats.num_error_rows else [])


def _read(path: Path) -> Total | None:
    """None if the file is missing or damaged: what it sums is still there."""
    try:
        values = unsealed(parse_object(path.read_bytes()))
        return Total(
            Stats.from_json(values["stats"]),
            int(values["num_output_rows"]),
            list(values["error_shards"]),
            list(values.get(SHARDS, ())),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
