"""The shards whose rows a replica generates at the moment.

Shards are leased one after the other, each when all rows of the one before have begun, so rows of two shards
may run at a time. A shard that another replica has taken over is dropped.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from specdist.data.leases.leases import View
from specdist.data.leases.shard_queue import LeasedShard, ShardQueue
from specdist.data.run.parts import PartLog
from specdist.data.store.storage import StorePath
from specdist.engine.request import Request
from specdist.job.rows.row_requests import RowRequests
from specdist.job.run.preflight import RunPlan

# Seconds between looks at the leases, as completions are recorded, while the target is at work; and the
# longest between looks.
LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 1.0, 5.0
# Looks on a store, where one takes as long as many passes.
LOOKS_PER_SILENCE = 6

logger = logging.getLogger(__name__)


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


class WorkOwner(Protocol):
    """Who generates the rows."""

    def begun(self, work: Work) -> None:
        """It is open from now on."""

    def dropped(self, work: Work) -> None:
        """It is not, since another replica has taken it over."""

    def finish_if_complete(self, work: Work) -> None:
        """It may have all its rows now."""

    def completed_elsewhere(self, shard: int) -> None:
        """Another replica has."""


class WorkQueue:
    """What is open in this replica, and what comes next.

    Attributes:
        open: by shard.
        shards: the leases.
    """

    def __init__(
        self,
        plan: RunPlan,
        rows: RowRequests,
        owner: WorkOwner,
        *,
        clock: Callable[[], float],
    ) -> None:
        """``clock``: seconds."""
        self._plan, self._rows, self._owner, self._clock = plan, rows, owner, clock
        self.shards = ShardQueue(
            plan.folder,
            plan.membership,
            plan.manifest,
            plan.shards.num_shards,
            on_done_elsewhere=owner.completed_elsewhere,
        )
        self.open: dict[int, Work] = {}
        self._next: LeasedShard | None = None
        self._poll_at = self._looked_at = self._look_at = -math.inf
        self._look_interval_s = LOOK_INTERVAL_S
        if isinstance(plan.folder.path, StorePath):
            self._look_interval_s = min(
                MAX_LOOK_INTERVAL_S, plan.membership.silent_after_s / LOOKS_PER_SILENCE
            )

    def lease(self) -> bool:
        """Lease the next shard, unless rows are left to begin; False if there is nothing now."""
        if not self._has_pending and self._next is None:
            self._next = self.shards.take()
        return self._has_pending or self._next is not None

    def next(self, lease: Callable[[], bool]) -> Work | None:
        """What a row can be begun of, leased if need be; ``lease`` calls :meth:`lease`."""
        while True:
            for work in self.open.values():
                if work.pending:
                    return work
            has_none = self.shards.is_done or self.shards.is_all_mine or self._clock() < self._poll_at
            if self._next is None and has_none:
                return None
            if not lease():
                self._poll_at = self._clock() + self.shards.poll_s
                return None
            if self._next is not None:
                leased, self._next = self._next, None
                self._begin(leased)

    def is_finished(self, log: PartLog, row: int) -> bool:
        """Whether the log has all samples of a row."""
        return all((row, sample) in log.results for sample in range(self._rows.num_samples(row)))

    def close(self, work: Work) -> bool:
        """It is complete, or another replica's; False if it was closed before."""
        if self.open.get(work.shard) is not work:
            return False
        del self.open[work.shard]
        return True

    @property
    def is_look_due(self) -> bool:
        """Whether a completion is to give reason to look at the leases."""
        return self._clock() >= self._look_at

    def tick(self) -> None:
        """Do what is due between rounds: look at the leases if no completion has given reason to for long."""
        if self._clock() >= max(self._look_at, self._looked_at + MAX_LOOK_INTERVAL_S) and self._has_pending:
            self.look()

    @property
    def _has_pending(self) -> bool:
        return any(work.pending or work.following for work in self.open.values())

    def _begin(self, leased: LeasedShard) -> None:
        rows = range(*self._plan.shards.bounds(leased.shard))
        log = self.shards.log(leased, rows)
        pending = deque(row for row in rows if not self.is_finished(log, row))
        num_expected = self._rows.num_completions(rows)
        work = self.open[leased.shard] = Work(leased, log, num_expected, pending)
        if self._looked_at == -math.inf:
            # The leases were looked at to find this one.
            self._looked(self.shards.view)
        self._owner.begun(work)
        # All rows may be finished already.
        self._owner.finish_if_complete(work)

    def look(self) -> None:
        """See which leases are in force."""
        view = self.shards.look()
        self._looked(view)
        for work in list(self.open.values()):
            if view.latest.get(work.leased.lease.name) != work.leased.lease:
                self._drop(work)

    def _looked(self, view: View) -> None:
        self._looked_at = self._clock()
        listing_s = self._plan.membership.listing_s(view.num_files)
        self._look_at = self._looked_at + max(self._look_interval_s, listing_s)

    def _drop(self, work: Work) -> None:
        """Leave rows to the replica that took them over because this one was silent for too long."""
        logger.warning("%s was taken over by another replica: it is no longer generated here", work.name)
        self.close(work)
        work.log.close()
        self._owner.dropped(work)
        self.shards.lost(work.leased)
