"""What readers of a run ask of each finished shard: of many shards, together for each numbered folder.

``stats/figures-00012.json`` is written with the total or the subtotal of that folder, so that nobody opens a
hundred thousand small files to draw a picture, or to learn which shards are complete. All that it says is in
the shards' own files: nothing is lost with one that is missing or damaged, and a restart deletes those of
folders from which files of shards are gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np

from specdist.data.run.layout import FIGURES, RunLayout
from specdist.data.run.publishing import ShardRecord
from specdist.data.stats.shard import Stats
from specdist.data.store.files import sealed, unsealed, write_atomically
from specdist.utils.json_values import parse_object

# Of a shard's statistics these, by their names there; and some that are in parts of them.
COUNTS = (
    "num_completions", "num_error_rows", "num_completion_tokens", "num_prompt_tokens", "num_target_passes",
    "num_draft_passes", "num_row_steps", "num_accepted_tokens", "num_trusted_tokens", "num_ahead_hits",
    "num_misses", "wall_ns",
)  # fmt: skip
FROM_STATS: dict[str, Callable[[Stats], int]] = {
    **{name: attrgetter(name) for name in COUNTS},
    "verify_ns": attrgetter("target_ns.verify"),
    "draft_ns": attrgetter("draft_ns.draft"),
    "begin_unix_ns": attrgetter("work_span.begin_unix_ns"),
    "end_unix_ns": attrgetter("work_span.end_unix_ns"),
}
SHARD, REPLICAS, REPLICA, DIGEST = "shard", "replicas", "replica", "sha256"
NUM_ROWS, NUM_BYTES = "num_output_rows", "num_bytes"
INTEGERS = (SHARD, REPLICA, NUM_ROWS, NUM_BYTES, *FROM_STATS)
# Of fewer shards of a folder each is looked at: that is faster than to list the folder.
FEWEST_LISTED = 64


@dataclass(frozen=True)
class FinishedShard:
    """A finished shard as its own files have it; ``replica``: who finished it, empty if unknown."""

    shard: int
    stats: Stats
    replica: str
    record: ShardRecord


@dataclass(frozen=True, eq=False)
class ShardFigures:
    """A value per finished shard [S], ascending by shard.

    Attributes:
        columns: integers by the names in :data:`INTEGERS`; :data:`REPLICA` is a place in ``replicas``.
        replicas: names, empty for an unknown one.
        digests: of the shards' data, as recorded.
    """

    columns: dict[str, np.ndarray]
    replicas: Sequence[str]
    digests: np.ndarray

    @staticmethod
    def of(shards: Iterable[FinishedShard]) -> ShardFigures:
        """Ascending, whatever the order of ``shards``. Raises OverflowError for more than 64 bits."""
        found = sorted(shards, key=lambda each: each.shard)
        places = {name: place for place, name in enumerate(dict.fromkeys(each.replica for each in found))}
        columns: dict[str, list[int]] = {
            SHARD: [each.shard for each in found],
            REPLICA: [places[each.replica] for each in found],
            NUM_ROWS: [each.record.num_rows for each in found],
            NUM_BYTES: [each.record.num_bytes for each in found],
            **{name: [get(each.stats) for each in found] for name, get in FROM_STATS.items()},
        }
        return ShardFigures(
            {name: np.array(values, np.int64) for name, values in columns.items()},
            list(places),
            np.array([each.record.sha256 for each in found], object),
        )

    @staticmethod
    def joined(parts: Sequence[ShardFigures]) -> ShardFigures:
        """Of shards of which no two parts have the same."""
        parts = parts or [ShardFigures.of([])]
        names = dict.fromkeys(name for part in parts for name in part.replicas)
        places = {name: place for place, name in enumerate(names)}
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in INTEGERS}
        renamed = [np.array([places[name] for name in part.replicas], np.int64) for part in parts]
        columns[REPLICA] = np.concatenate(
            [to[part.columns[REPLICA]] for to, part in zip(renamed, parts, strict=True)]
        )
        order = np.argsort(columns[SHARD], kind="stable")
        return ShardFigures(
            {name: column[order] for name, column in columns.items()},
            list(places),
            np.concatenate([part.digests for part in parts])[order],
        )

    def among(self, shards: Collection[int]) -> ShardFigures:
        """Those of these shards."""
        is_wanted_S = np.isin(self.shards, np.fromiter(shards, np.int64, len(shards)))
        columns = {name: column[is_wanted_S] for name, column in self.columns.items()}
        places, columns[REPLICA] = np.unique(columns[REPLICA], return_inverse=True)
        replicas = [self.replicas[place] for place in places]
        return ShardFigures(columns, replicas, self.digests[is_wanted_S])

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def shards(self) -> np.ndarray:
        """Their numbers."""
        return self.columns[SHARD]

    @cached_property
    def records(self) -> dict[int, ShardRecord]:
        """What each shard's data must match."""
        rows = zip(*(self.columns[name].tolist() for name in (SHARD, NUM_ROWS, NUM_BYTES)), self.digests,
                   strict=True)  # fmt: skip
        return {
            shard: ShardRecord(num_rows=num_rows, num_bytes=num_bytes, sha256=digest)
            for shard, num_rows, num_bytes, digest in rows
        }

    def replica_of(self, index: int) -> str:
        """The replica of the shard at this place."""
        return self.replicas[self.columns[REPLICA][index]]

    def write(self, path: Path) -> None:
        """Raises OSError."""
        columns = {name: column.tolist() for name, column in self.columns.items()}
        values = sealed({REPLICAS: list(self.replicas), **columns, DIGEST: self.digests.tolist()})
        # In one line: indented, these thousands of numbers take ten times as long to write.
        content = json.dumps(values).encode()
        write_atomically(path, lambda file: file.write(content))

    @staticmethod
    def read(path: Path) -> ShardFigures:
        """Of no shards if the file is missing or damaged."""
        try:
            values = unsealed(parse_object(path.read_bytes()))
            columns = {name: np.array(values[name], np.int64) for name in INTEGERS}
            found = ShardFigures(columns, values[REPLICAS], np.array(values[DIGEST], object))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return ShardFigures.of([])
        return found


def figures_among(layout: RunLayout, shards: Collection[int]) -> ShardFigures:
    """Of those of these shards that the folders' files of figures have."""
    groups = layout.groups_with(FIGURES) & layout.by_group(shards).keys()
    found = ShardFigures.joined(
        [ShardFigures.read(layout.sum_path(FIGURES, group)) for group in sorted(groups)]
    )
    return found.among(shards)


def surely_complete(layout: RunLayout, shards: Sequence[int]) -> set[int]:
    """Those of these shards that are complete by the figures of their folder and two listings of it: data of
    the recorded size, a record and statistics. Others may be complete, too."""
    by_group = layout.by_group(shards)
    large = {group for group, mine in by_group.items() if len(mine) >= FEWEST_LISTED}
    figured = layout.groups_with(FIGURES) if large else set[str]()
    found = set[int]()
    for group in sorted(large & figured):
        figures = ShardFigures.read(layout.sum_path(FIGURES, group)).among(by_group[group])
        sizes = layout.sizes_of_data(group)
        recorded, with_stats = layout.recorded_in(group), layout.with_stats_in(group)
        sizes_S = zip(figures.shards.tolist(), figures[NUM_BYTES].tolist(), strict=True)
        found |= {shard for shard, size in sizes_S if sizes.get(shard) == size} & recorded & with_stats
    return found
