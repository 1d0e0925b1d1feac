"""A shard while its rows are generated."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdist.data.leases.shard_queue import LeasedShard
from specdist.data.run.parts import PartLog
from specdist.engine.request import Request


@dataclass
class Work:
    """A shard of this replica, while its rows are generated.

    ``pending``: rows that have not begun, the next one first; ``begun``: those that have, here.
    ``following``: requests that follow from completions.
    """

    leased: LeasedShard
    log: PartLog
    num_expected: int
    pending: deque[int]
    begun: set[int] = field(default_factory=set)
    following: deque[Request] = field(default_factory=deque)
    snapshot_at: float = 0.0

    @property
    def is_new(self) -> bool:
        """No row has begun, here or before."""
        return not (self.begun or self.log.results)

    @property
    def name(self) -> str:
        """A name for people."""
        return f"shard {self.shard}"

    @property
    def shard(self) -> int:
        return self.leased.shard
