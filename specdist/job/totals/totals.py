"""Sums of finished shards' statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specdist.data.run.publishing import ShardRecord
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.shard import Stats
from specdist.data.store.storage import in_parallel


@dataclass(frozen=True)
class FinishedShard:
    """A finished shard as its own files have it.

    Attributes:
        replica: who finished it, empty if unknown.
        num_rows: in its data file: completions and errors.
    """

    shard: int
    stats: Stats
    replica: str
    num_rows: int

    @property
    def span_s(self) -> tuple[float, float] | None:
        """Seconds of Unix time of its first request and its last completion; None where nothing was
        generated."""
        span = self.stats.work_span
        return (span.begin_unix_ns / NS_PER_S, span.end_unix_ns / NS_PER_S) if span.end_unix_ns else None

    @property
    def work_s(self) -> float:
        """Seconds that its replica spent on it."""
        return self.stats.wall_ns / NS_PER_S

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of :attr:`work_s`; 0 without work."""
        return self.stats.num_completion_tokens / self.work_s if self.work_s else 0.0


@dataclass
class Total:
    """The sum of some finished shards.

    Attributes:
        num_rows: in their data files: completions and errors.
        error_shards: those that have rows with an error.
    """

    stats: Stats = field(default_factory=Stats)
    num_rows: int = 0
    error_shards: list[int] = field(default_factory=list)

    @staticmethod
    def of(shards: Iterable[FinishedShard]) -> Total:
        """The sum of these shards."""
        total = Total()
        for each in shards:
            total.stats.add(each.stats)
            total.num_rows += each.num_rows
            total.error_shards += [each.shard] if each.stats.num_error_rows else []
        return total

    def add(self, other: Total) -> None:
        """Add those of other shards."""
        self.stats.add(other.stats)
        self.num_rows += other.num_rows
        self.error_shards += other.error_shards


def read_finished(folder: RunFolder, shards: Iterable[int]) -> list[FinishedShard]:
    """These finished shards, in their order. Raises :class:`UserError` for damaged statistics."""
    return in_parallel(folder.path, lambda shard: _read_shard(folder, shard), shards)


def total_of(folder: RunFolder, shards: Iterable[int]) -> Total:
    """The sum of these finished shards. Raises :class:`UserError` for damaged statistics."""
    return Total.of(read_finished(folder, shards))


def _read_shard(folder: RunFolder, shard: int) -> FinishedShard:
    values = folder.read_stats(shard)
    record = ShardRecord.read(folder.record_path(shard))
    num_rows = 0 if record is None else record.num_rows
    return FinishedShard(shard, Stats.from_json(values), str(values.get("replica", "")), num_rows)
