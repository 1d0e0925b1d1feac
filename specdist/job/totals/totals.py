"""Sums of finished shards' statistics: of a run with many shards, a file for each of its numbered folders;
and of a folder with unfinished shards one that says which of them it sums, written from time to time. Beside
each a file with some figures of each of these shards: :mod:`specdist.data.stats.figures`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdist.data.run.layout import FIGURES, SUBTOTAL, TOTAL
from specdist.data.run.publishing import ShardRecord
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.figures import FinishedShard, ShardFigures, figures_among
from specdist.data.stats.shard import Stats
from specdist.data.store.files import sealed, unsealed, write_json, writing
from specdist.data.store.storage import in_parallel
from specdist.utils.json_values import parse_object

# A subtotal is written when a shard with a multiple of this number is finished.
SHARDS_PER_SUBTOTAL = 64
SHARDS_PER_PIECE = 1000
SHARDS = "shards"


@dataclass
class Total:
    """Of some finished shards.

    Attributes:
        num_rows: in their data files: completions and errors.
        error_shards: those that have rows with an error.
        shards: those that it sums; a total's own file does not say so.
    """

    stats: Stats = field(default_factory=Stats)
    num_rows: int = 0
    error_shards: list[int] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)

    def add(self, other: Total) -> None:
        self.stats.add(other.stats)
        self.num_rows += other.num_rows
        self.error_shards += other.error_shards
        self.shards += other.shards

    def to_json(self) -> dict[str, Any]:
        return {
            "num_output_rows": self.num_rows,
            "error_shards": self.error_shards,
            "stats": self.stats.to_json(),
        }


def write_total(folder: RunFolder, shard: int, num_shards: int) -> None:
    """If this shard's numbered folder is complete now, write its total; if not, from time to time the sum of
    those that are finished. Before either, the figures of each of its shards. Raises :class:`UserError` if
    the disk fails, or if a file is damaged."""
    group = folder.group_of(shard)
    if not group:
        return
    shards = folder.shards_of(group, num_shards)
    recorded = folder.recorded_in(group)
    is_whole = recorded.issuperset(shards)
    if not is_whole and shard % SHARDS_PER_SUBTOTAL:
        return
    total, figures = _with_rest(
        folder,
        recorded,
        _of_group(folder, group, recorded),
        ShardFigures.read(folder.sum_path(FIGURES, group)),
    )
    with writing(folder.sum_path(FIGURES, group)):
        figures.write(folder.sum_path(FIGURES, group))
    path, subtotal = folder.sum_path(TOTAL, group), folder.sum_path(SUBTOTAL, group)
    with writing(path):
        if is_whole:
            write_json(path, sealed(total.to_json()))
            subtotal.unlink(missing_ok=True)
        else:
            write_json(subtotal, sealed({SHARDS: sorted(recorded)} | total.to_json()))


def total_of(folder: RunFolder, shards: Iterable[int]) -> Total:
    """Of these finished shards, from the totals of the folders that are among them whole, and the subtotals
    of others. Raises :class:`UserError` for damaged statistics."""
    wanted = set(shards)
    total, _ = _with_rest(folder, wanted, _summed(folder, wanted), None)
    return total


def total_and_figures(folder: RunFolder, shards: Iterable[int]) -> tuple[Total, ShardFigures]:
    """The same, and the figures of each of these shards: a shard's own files are read only if the folders'
    files lack it, and then once."""
    wanted = set(shards)
    return _with_rest(folder, wanted, _summed(folder, wanted), figures_among(folder, wanted))


def subtotalled(folder: RunFolder, group: str) -> set[int]:
    """The shards of a group that its subtotal sums, all of which were complete then."""
    return set(_subtotal(folder, group).shards)


def _summed(folder: RunFolder, wanted: set[int]) -> Total:
    """What totals and subtotals say of these shards, and of no others."""
    total = Total()
    totalled = folder.groups_with(TOTAL)
    num_shards = folder.plan().num_shards if totalled else 0
    for group in filter(None, folder.by_group(wanted)):
        if group not in totalled:
            total.add(_of_group(folder, group, wanted))
            continue
        members = folder.shards_of(group, num_shards)
        if wanted.issuperset(members) and (found := _read(folder.sum_path(TOTAL, group))) is not None:
            total.add(dataclasses.replace(found, shards=list(members)))
    return total


def _of_group(folder: RunFolder, group: str, shards: set[int]) -> Total:
    """A group's subtotal if it is of shards among these; else of none."""
    total = _subtotal(folder, group)
    return total if shards.issuperset(total.shards) else Total()


def _subtotal(folder: RunFolder, group: str) -> Total:
    """Of no shards where none can be read."""
    return _read(folder.sum_path(SUBTOTAL, group)) or Total()


def _with_rest(
    folder: RunFolder, wanted: set[int], total: Total, figures: ShardFigures | None
) -> tuple[Total, ShardFigures]:
    """Add those of the shards that they lack, from the shards' own files; without ``figures`` to the total
    alone."""
    unsummed = wanted.difference(total.shards)
    parts = [] if figures is None else [figures.among(wanted)]
    unfigured = set[int]() if figures is None else wanted.difference(parts[0].shards.tolist())
    left = sorted(unsummed | unfigured)
    # A piece at a time: all of these statistics at once would fill the memory.
    for start in range(0, len(left), SHARDS_PER_PIECE):
        found = in_parallel(
            folder.path, lambda shard: _read_shard(folder, shard), left[start : start + SHARDS_PER_PIECE]
        )
        for each in found:
            if each.shard in unsummed:
                total.add(_of_shard(each))
        parts.append(ShardFigures.of(each for each in found if each.shard in unfigured))
    return total, ShardFigures.joined(parts)


def _read_shard(folder: RunFolder, shard: int) -> FinishedShard:
    values = folder.read_stats(shard)
    record = ShardRecord.read(folder.record_path(shard)) or ShardRecord(num_rows=0, num_bytes=0, sha256="")
    return FinishedShard(shard, Stats.from_json(values), str(values.get("replica", "")), record)


def _of_shard(found: FinishedShard) -> Total:
    errors = [found.shard] if found.stats.num_error_rows else []
    return Total(found.stats, found.record.num_rows, errors, [found.shard])


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
