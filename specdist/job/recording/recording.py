"""From completions to finished shards: a log of parts while rows finish, an Arrow file once all have."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.data.store.storage import StorePath
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.job.costs.corrections import Corrections
from specdist.job.recording.uploads import ShardWriter
from specdist.job.recording.work import Work, WorkQueue
from specdist.job.rows.row_requests import RowRequests
from specdist.job.rows.row_results import extend_to_now
from specdist.job.run.preflight import RunPlan
from specdist.job.totals.progress import Progress
from specdist.policies.costs import Agree, CostModel
from specdist.utils.errors import UserError

# Seconds between copies of the statistics, as completions are recorded, while the target is at work.
SNAPSHOT_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


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
        corrections: Corrections | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``writer``: of finished shards; ``corrections``: of what decides rounds; ``clock``: seconds."""
        self._plan, self._rows, self._stats_recorder = plan, rows, stats_recorder
        self._progress, self._clock = progress, clock
        self._writer, self._corrections = writer or ShardWriter(plan), corrections
        self.waits_for_costs = False
        """The next row needs other costs, once those that run have ended: see :meth:`change_costs`."""
        self._work = WorkQueue(plan, rows, self, clock=clock)

    @property
    def is_run_complete(self) -> bool:
        """Whether every shard is complete, here or in another replica."""
        return self._work.shards.is_done

    @property
    def poll_s(self) -> float:
        """Seconds to wait after :meth:`lease` found nothing."""
        return self._work.shards.poll_s

    @property
    def num_uploads(self) -> int:
        """Finished shards on their way to their files."""
        return len(self._writer.uploads)

    def settle(self) -> None:
        """While nothing is generated: see which finished shards have their files. A disk's are waited for."""
        is_stored = isinstance(self._plan.folder.path, StorePath)
        self._writer.uploads.settle(max_running=None if is_stored else 0)

    def lease(self) -> bool:
        """Lease the next shard, unless rows are left to begin; False if there is nothing now."""
        self._writer.uploads.settle()
        return self._work.lease()

    def tick(self) -> None:
        """Do what is due between rounds."""
        self._work.tick()

    def requests(self) -> Iterator[Request | None]:
        """A request for every unfinished completion, shard after shard; None while there is nothing to begin,
        which may change while others run."""
        while True:
            # A conversation goes on while its beginning is in the cache.
            following = next((work.following for work in self._work.open.values() if work.following), None)
            if following is not None:
                yield following.popleft()
                continue
            work = None if self.waits_for_costs else self._work.next(self.lease)
            if work is None or not self._may_begin(work):
                yield None
                continue
            row_id = work.pending.popleft()
            results = work.log.results
            samples = [
                sample for sample in range(self._rows.num_samples(row_id)) if (row_id, sample) not in results
            ]
            work.begun.add(row_id)
            for found in self._rows.begin(row_id, samples, work.shard):
                if isinstance(found, Request):
                    yield found
                else:
                    self._record(work, found)
            # All rows may have errors.
            self.finish_if_complete(work)

    def _may_begin(self, work: Work) -> bool:
        if self._corrections is not None:
            stats = self._stats_recorder.shard(work.shard)
            self.waits_for_costs = not self._corrections.may_begin(stats, is_new=work.is_new)
        return not self.waits_for_costs

    def change_costs(self, use: Callable[[CostModel | None, Agree], CostModel]) -> None:
        """See :meth:`Corrections.change`."""
        assert self._corrections is not None
        self.waits_for_costs = False
        # It may have been taken over meanwhile.
        work = self._work.next(self.lease)
        stats = Stats() if work is None else self._stats_recorder.shard(work.shard)
        self._corrections.change(stats, use, is_new=work is None or work.is_new)

    def record(self, completion: Completion) -> None:
        """Record a finished completion; from now on it survives the end of this process. One of a shard that
        another replica has taken over is not recorded."""
        request = completion.request
        work = self._work.open.get(request.shard)
        # It may have been dropped, and even leased again without a request for this row so far.
        if work is None or request.row_id not in work.begun:
            return
        found = self._rows.end(completion)
        if isinstance(found, Request):
            work.following.append(found)
            return
        self._record(work, found)
        self.finish_if_complete(work)

    def close(self) -> None:
        """Release all unfinished shards; their recorded rows are kept."""
        try:
            self._writer.uploads.close()
            for work in self._work.open.values():
                with work.log as log, _tolerating_a_full_disk(work.name):
                    log.snapshot(self._stats_recorder.shard(work.shard).to_json())
                    log.keep()
        finally:
            self._work.open.clear()
            self._work.shards.give_back()

    def begun(self, work: Work) -> None:
        """Count what earlier holders of the shard have recorded."""
        self._progress.found(work.shard, len(work.log.results))
        stats = self._stats_recorder.shard(work.shard)
        if work.log.stats is not None:
            stats.add(Stats.from_json(work.log.stats))
        extend_to_now(stats)

    def dropped(self, work: Work) -> None:
        """Count nothing for it any more."""
        self._stats_recorder.close_shard(work.shard)

    def completed_elsewhere(self, shard: int) -> None:
        """Count all completions of a complete shard."""
        self._progress.completed(shard, self._rows.num_completions(range(*self._plan.shards.bounds(shard))))

    def _record(self, work: Work, result: RowResult) -> None:
        if self._work.open.get(work.shard) is not work:
            return
        work.log.append(result)
        now = self._clock()
        if now - work.snapshot_at >= SNAPSHOT_INTERVAL_S:
            work.log.snapshot(self._stats_recorder.shard(work.shard).to_json())
            work.snapshot_at = now
        if self._work.is_look_due:
            self._writer.uploads.settle()
            self._work.look()
        self._progress.add(result, work.shard)
        self._plan.membership.heartbeat.count(result.num_completion_tokens)

    def finish_if_complete(self, work: Work) -> None:
        """Publish a shard once it has all its rows."""
        if len(work.log.results) < work.num_expected or not self._work.close(work):
            return
        counted = self._stats_recorder.close_shard(work.shard)
        extend_to_now(counted)
        leased, shard = work.leased, work.shard
        rows = range(*self._plan.shards.bounds(shard))
        work.log.close()

        def published(is_mine: bool) -> None:
            if is_mine:
                self.completed_elsewhere(shard)
                self._work.shards.finished(leased)
            else:
                logger.warning("shard %d was already completed by another replica; result discarded", shard)
                self._work.shards.lost(leased)

        self._writer.write(
            shard,
            list(work.log.results.values()),
            counted,
            num_samples=list(map(self._rows.num_samples, rows)),
            is_held=lambda: self._work.shards.is_held(leased),
            then=published,
        )


@contextlib.contextmanager
def _tolerating_a_full_disk(name: str) -> Iterator[None]:
    """Log an error on writing at the end, of which a full disk may be the reason: the leases must be released
    all the same, and only statistics are lost."""
    try:
        yield
    except UserError as error:
        logger.warning("the latest statistics of %s are lost: %s", name, error)
