"""From completions to finished shards: a part log while rows finish, an Arrow file when a shard is complete.

Shards are claimed one after the other, each when the engine has taken all requests of the one before, so rows
of two shards may run at a time. When none is left, rows of a shard that have not begun are offered as
*splits* to replicas that have nothing to do: see :mod:`specdist.data.leases.shard_queue`. A shard that
another replica has taken over is dropped; completions of its rows that are still running are not recorded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specdist.data.leases.claims import View
from specdist.data.leases.shard_choice import split_off, splits_wanted
from specdist.data.leases.shard_queue import ClaimedShard, ShardQueue
from specdist.data.run.parts import PartLog
from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.data.store.storage import StorePath
from specdist.engine.request import Completion, Request
from specdist.engine.times.stats_recorder import StatsRecorder
from specdist.job.preflight import RunPlan
from specdist.job.rows.lengths import ExpectedLengths
from specdist.job.rows.row_requests import RowRequests
from specdist.job.rows.row_results import extend_to_now
from specdist.job.rows.uploads import ShardWriter
from specdist.job.totals.progress import Progress
from specdist.utils.errors import UserError

# Between snapshots, and between looks at the claims: as completions are recorded, while the target is at
# work; and the longest between looks.
SNAPSHOT_INTERVAL_S, LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 1.0, 1.0, 5.0
# On a store, where a look takes as long as many passes.
LOOKS_PER_SILENCE = 6

logger = logging.getLogger(__name__)


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


class Recorder:
    """Gives the engine its requests and records their completions; resumes unfinished shards."""

    def __init__(
        self,
        plan: RunPlan,
        rows: RowRequests,
        stats_recorder: StatsRecorder,
        *,
        progress: Progress,
        writer: ShardWriter | None = None,
        lengths: ExpectedLengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``writer``: of finished shards. ``lengths``: for the order in which rows begin; None: that of the
        input. ``clock``: seconds."""
        self._plan, self._rows, self._stats_recorder = plan, rows, stats_recorder
        self._progress, self._lengths, self._clock = progress, lengths, clock
        self._writer = writer or ShardWriter(plan)
        self._queue = ShardQueue(
            plan.folder,
            plan.membership,
            plan.manifest,
            plan.shards.num_shards,
            on_done_elsewhere=self._count_complete,
        )
        self._next: ClaimedShard | None = None
        self._open: dict[int, Work] = {}
        self._next_key = plan.shards.num_shards
        self._poll_at = self._looked_at = self._look_at = -math.inf
        self._look_interval_s = LOOK_INTERVAL_S
        if isinstance(plan.folder.path, StorePath):
            self._look_interval_s = min(
                MAX_LOOK_INTERVAL_S, plan.membership.silent_after_s / LOOKS_PER_SILENCE
            )

    @property
    def is_run_complete(self) -> bool:
        """Whether every shard is complete, here or in another replica."""
        return self._queue.is_done

    @property
    def poll_s(self) -> float:
        """Seconds to wait after :meth:`claim` found nothing."""
        return self._queue.poll_s

    @property
    def num_uploads(self) -> int:
        """Finished shards on their way to their files."""
        return len(self._writer.uploads)

    def settle(self) -> None:
        """While nothing is generated: see which finished shards have their files. A disk's are waited for."""
        is_stored = isinstance(self._plan.folder.path, StorePath)
        self._writer.uploads.settle(max_running=None if is_stored else 0)

    def claim(self) -> bool:
        """Claim the next shard or split, unless rows are left to begin; False if there is nothing now."""
        self._writer.uploads.settle()
        if not self._has_pending and self._next is None:
            self._next = self._queue.take()
            self._settle_splits()
        return self._has_pending or self._next is not None

    def requests(self) -> Iterator[Request | None]:
        """A request for every unfinished completion, shard after shard; None while there is nothing to begin,
        which may change while others run."""
        while True:
            # A conversation goes on while its beginning is in the cache.
            following = next((work.following for work in self._open.values() if work.following), None)
            if following is not None:
                yield following.popleft()
                continue
            work = self._work_to_begin()
            if work is None:
                yield None
                continue
            row_id = work.pending.popleft()
            results = work.log.results
            samples = [
                sample for sample in range(self._rows.num_samples(row_id)) if (row_id, sample) not in results
            ]
            work.begun.add(row_id)
            for found in self._rows.begin(row_id, samples, work.key):
                if isinstance(found, Request):
                    yield found
                else:
                    self._record(work, found)
            # All rows may have errors.
            self._finish_if_complete(work)

    def tick(self) -> None:
        """To be called between rounds: looks at the claims if no completion has given reason to for long."""
        if self._clock() >= max(self._look_at, self._looked_at + MAX_LOOK_INTERVAL_S) and self._has_pending:
            self._look()

    @property
    def _has_pending(self) -> bool:
        return any(work.pending or work.following for work in self._open.values())

    def _work_to_begin(self) -> Work | None:
        """What a row can be begun of, claimed if need be."""
        while True:
            for work in self._open.values():
                if work.pending:
                    return work
            if self._next is None:
                is_alone = self._queue.is_all_mine and not any(work.splits for work in self._open.values())
                if self._queue.is_done or is_alone or self._clock() < self._poll_at:
                    return None
            if not self.claim():
                self._poll_at = self._clock() + self.poll_s
                return None
            if self._next is not None:
                claimed, self._next = self._next, None
                self._begin(claimed)

    def _begin(self, claimed: ClaimedShard) -> None:
        shard = claimed.shard
        rows = range(*self._plan.shards.bounds(shard)) if claimed.rows is None else claimed.rows
        log = self._queue.log(claimed, rows)
        splits = self._queue.offered(shard) if claimed.split is None else {}
        key = shard
        if claimed.split is None:
            self._progress.found(shard, len(log.results))
        else:
            key, self._next_key = self._next_key, self._next_key + 1
        elsewhere = {row for offered in splits.values() for row in offered}
        pending = [row for row in rows if row not in elsewhere and not self._is_finished(log, row)]
        if self._lengths is not None:
            self._lengths.begin(pending)
            pending = self._lengths.longest_first(pending)
        work = self._open[key] = Work(
            key, claimed, log, rows, self._rows.num_completions(rows), deque(pending), splits
        )
        if self._looked_at == -math.inf:
            # The claims were looked at to find this one.
            self._looked(self._queue.view)
        stats = self._stats_recorder.shard(key)
        if log.stats is not None:
            stats.add(Stats.from_json(log.stats))
        extend_to_now(stats)
        self._offer_splits()
        # All rows may be finished already.
        self._finish_if_complete(work)

    def record(self, completion: Completion) -> None:
        """Record a finished completion; from now on it survives the end of this process."""
        request = completion.request
        work = self._open.get(request.shard)
        # It may have been dropped, and even claimed again without a request for this row so far.
        if work is None or request.row_id not in work.begun:
            return
        found = self._rows.end(completion)
        if isinstance(found, Request):
            work.following.append(found)
            return
        self._record(work, found)
        self._finish_if_complete(work)

    def close(self) -> None:
        """Release all unfinished shards; their recorded rows are kept."""
        try:
            self._writer.uploads.close()
            for work in self._open.values():
                with work.log as log, _tolerating_a_full_disk(work.name):
                    log.snapshot(self._stats_recorder.shard(work.key).to_json())
                    log.keep()
        finally:
            self._open.clear()
            self._queue.give_back()

    def _is_finished(self, log: PartLog, row: int) -> bool:
        return all((row, sample) in log.results for sample in range(self._rows.num_samples(row)))

    def _count_complete(self, shard: int) -> None:
        self._progress.completed(shard, self._rows.num_completions(range(*self._plan.shards.bounds(shard))))

    def _record(self, work: Work, result: RowResult) -> None:
        if self._open.get(work.key) is not work:
            return
        work.log.append(result)
        self._learn(result)
        now = self._clock()
        if now - work.snapshot_at >= SNAPSHOT_INTERVAL_S:
            work.log.snapshot(self._stats_recorder.shard(work.key).to_json())
            work.snapshot_at = now
        if now >= self._look_at:
            self._writer.uploads.settle()
            self._look()
        self._progress.add(result, work.claimed.shard)
        self._plan.membership.heartbeat.count(result.num_completion_tokens)

    def _learn(self, result: RowResult) -> None:
        if self._lengths is None or result.finish_reason == "error":
            return
        if self._lengths.observe(result.row_id, result.num_completion_tokens):
            for work in self._open.values():
                work.pending = deque(self._lengths.longest_first(work.pending))

    def _look(self) -> None:
        """See which claims are in force; offer rows to replicas that wait."""
        view = self._queue.look()
        self._looked(view)
        for work in list(self._open.values()):
            if view.latest.get(work.claimed.claim.name) != work.claimed.claim:
                self._drop(work)
        self._settle_splits()
        self._offer_splits()

    def _looked(self, view: View) -> None:
        self._looked_at = self._clock()
        listing_s = self._plan.membership.listing_s(view.num_files)
        self._look_at = self._looked_at + max(self._look_interval_s, listing_s)

    def _offer_splits(self) -> None:
        """Offer rows to replicas that wait, or will soon."""
        view = self._queue.view
        wanted = splits_wanted(view.num_waiting, len(view.shards))
        if not wanted and self._queue.is_last_claimed and view.num_replicas > 1:
            wanted = 1
        for work in self._open.values() if wanted else ():
            if work.pending and work.claimed.split is None:
                self._offer(work, wanted)

    def _offer(self, work: Work, wanted: int) -> None:
        """Offer rows that have not begun as splits until so many are free."""
        latest, shard = self._queue.view.latest, work.claimed.shard
        wanted -= sum(name in latest and latest[name].generation == 1 for name in work.splits)
        for _ in range(wanted):
            if not work.pending:
                return
            rows = split_off(work.pending, wanted)
            work.next_split = work.next_split or self._queue.next_split(shard)
            name = self._queue.offer(work.claimed, rows, work.next_split)
            work.next_split += 1
            if name is None:
                return
            work.splits[name] = rows
            offered = set(rows)
            work.pending = deque(row for row in work.pending if row not in offered)

    def _settle_splits(self) -> None:
        """Take the rows of splits that are finished; those of one that was given up begin here."""
        for work in list(self._open.values()):
            gone = [name for name in work.splits if self._queue.is_gone(name)]
            if not gone:
                continue
            for log in self._plan.folder.logs(work.claimed.shard):
                if log.split is not None:
                    work.log.add_rows(log.path)
            rows = [row for name in gone for row in work.splits.pop(name)]
            missing = [row for row in rows if not self._is_finished(work.log, row)]
            work.pending.extend(missing)
            self._finish_if_complete(work)

    def _drop(self, work: Work) -> None:
        """Leave rows to the replica that took them over because this one was silent for too long."""
        logger.warning("%s was taken over by another replica: it is no longer generated here", work.name)
        del self._open[work.key]
        work.log.close()
        self._stats_recorder.close_shard(work.key)
        self._end_lengths(work)
        self._queue.lost(work.claimed)

    def _end_lengths(self, work: Work) -> None:
        if self._lengths is not None:
            self._lengths.end(work.rows)

    def _finish_if_complete(self, work: Work) -> None:
        if self._open.get(work.key) is not work or len(work.log.results) < work.num_expected:
            return
        del self._open[work.key]
        counted = self._stats_recorder.close_shard(work.key)
        extend_to_now(counted)
        if work.claimed.split is None:
            self._finish_shard(work, counted)
        else:
            with work.log as log:
                log.snapshot(counted.to_json())
                # Before its claim is removed: the shard's holder takes the rows then.
                log.keep()
            self._queue.finished(work.claimed)
        self._end_lengths(work)

    def _finish_shard(self, work: Work, counted: Stats) -> None:
        claimed, shard = work.claimed, work.claimed.shard
        rows = range(*self._plan.shards.bounds(shard))
        work.log.close()

        def published(is_mine: bool) -> None:
            if is_mine:
                self._count_complete(shard)
                self._queue.finished(claimed)
            else:
                logger.warning("shard %d was already completed by another replica; result discarded", shard)
                self._queue.lost(claimed)

        self._writer.write(
            shard,
            list(work.log.results.values()),
            counted,
            num_samples=list(map(self._rows.num_samples, rows)),
            is_held=lambda: self._queue.is_held(claimed),
            then=published,
        )


@contextlib.contextmanager
def _tolerating_a_full_disk(name: str) -> Iterator[None]:
    """Log an error on writing at the end, of which a full disk may be the reason: the claims must be released
    all the same, and only statistics are lost."""
    try:
        yield
    except UserError as error:
        logger.warning("the latest statistics of %s are lost: %s", name, error)
