"""Figures of each finished shard as arrays, for pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import FinishedShard

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


@dataclass(frozen=True, eq=False)
class ShardFigures:
    """A value per finished shard [S], ascending by shard.

    Attributes:
        shards: their numbers.
        columns: integers by the names in :data:`FROM_STATS`.
        places: of each shard's replica in ``replicas``.
        replicas: names, empty for an unknown one.
    """

    shards: np.ndarray
    columns: dict[str, np.ndarray]
    places: np.ndarray
    replicas: Sequence[str]

    @staticmethod
    def of(shards: Iterable[FinishedShard]) -> ShardFigures:
        """Ascending, whatever the order of ``shards``. Raises OverflowError for more than 64 bits."""
        found = sorted(shards, key=lambda each: each.shard)
        places = {name: place for place, name in enumerate(dict.fromkeys(each.replica for each in found))}
        return ShardFigures(
            np.array([each.shard for each in found], np.int64),
            {
                name: np.array([get(each.stats) for each in found], np.int64)
                for name, get in FROM_STATS.items()
            },
            np.array([places[each.replica] for each in found], np.int64),
            list(places),
        )

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def replica_of(self, index: int) -> str:
        """The replica of the shard at this place."""
        return self.replicas[self.places[index]]
