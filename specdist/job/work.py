"""What a replica generates at the moment: a shard, or a split of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdist.data.leases.shard_queue import ClaimedShard
from specdist.data.run.parts import PartLog
from specdist.engine.request import Request


@dataclass
class Work:
    """A shard of this replica, or a split of one, while its rows are generated.

    ``key``: under which its statistics are counted: the shard's number, or for a split one above all of them.
    ``pending``: rows that have not begun, the next one first; ``begun``: those that have, here.
    ``following``: requests that follow from completions. ``splits``: rows that were offered, by name.
    """

    key: int
    claimed: ClaimedShard
    log: PartLog
    rows: Sequence[int]
    num_expected: int
    pending: deque[int]
    splits: dict[str, tuple[int, ...]]
    next_split: int = 0
    begun: set[int] = field(default_factory=set)
    following: deque[Request] = field(default_factory=deque)
    snapshot_at: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        shard, split = self.claimed.shard, self.claimed.split
        return f"shard {shard}" if split is None else f"split {split} of shard {shard}"
