"""From completions to finished shards: a log of parts while rows finish, an Arrow file once all have."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from specdist.data.leases.leases import View
from specdist.data.leases.shard_queue import LeasedShard, ShardQueue
from specdist.data.run.parts import PartLog
from specdist.data.stats.regression import NS_PER_S
from specdist.data.stats.rows import RowResult
from specdist.data.stats.shard import Stats
from specdist.data.store.storage import StorePath
from specdist.engine.request import Completion, Request
from specdist.engine.rounds.stats_recorder import StatsRecorder
from specdist.job.costs.corrections import Corrections
from specdist.job.recording.uploads import ShardWriter
from specdist.job.recording.work import Work
from specdist.job.rows.rollout_rows import RolloutRows
from specdist.job.rows.row_requests import RowRequests
from specdist.job.rows.row_results import extend_to_now
from specdist.job.run.preflight import RunPlan
from specdist.job.totals.progress import Progress
from specdist.policies.costs import Agree, CostModel
from specdist.utils.errors import UserError

# Seconds between copies of the statistics, as completions are recorded, while the target is at work.
SNAPSHOT_INTERVAL_S = 1.0
# Seconds between looks at the leases, as completions are recorded, while the target is at work; and the
# longest between looks.
LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 1.0, 5.0
# Seconds to wait for an answer of a rollout function, while nothing else is to be done.
ANSWER_WAIT_S = 1.0
# Looks on a store, where one takes as long as many passes.
LOOKS_PER_SILENCE = 6

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
        self._rollouts = rows if isinstance(rows, RolloutRows) else None
        self._num_running = 0
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

    @property
    def waits_for_answers(self) -> bool:
        """Whether a function judges completions of rows that are to go on."""
        return self._rollouts is not None and self._rollouts.num_waiting > 0

    def tick(self) -> None:
        """Do what is due between rounds."""
        self._work.tick()
        self._take_answers()

    def requests(self) -> Iterator[Request | None]:
        """A request for every unfinished completion, shard after shard; None while there is nothing to begin,
        which may change while others run."""
        for request in self._unfinished():
            self._num_running += request is not None
            yield request

    def _unfinished(self) -> Iterator[Request | None]:
        while True:
            # A conversation goes on while its beginning is in the cache.
            following = next((work.following for work in self._work.open.values() if work.following), None)
            if following is not None:
                yield following.popleft()
                continue
            may_begin = not self.waits_for_costs and (self._rollouts is None or self._rollouts.may_begin)
            work = self._work.next(self.lease) if may_begin else None
            if work is None or not self._may_begin(work):
                # Without anything to run, nobody asks again before an answer is there.
                if self._num_running or not self._take_answers(ANSWER_WAIT_S):
                    yield None
                continue
            row_id = work.pending.popleft()
            results = work.log.results
            samples = [
                sample for sample in range(self._rows.num_samples(row_id)) if (row_id, sample) not in results
            ]
            work.begun.add(row_id)
            for found in self._rows.begin(row_id, samples, work.shard, work.log):
                if isinstance(found, Request):
                    yield found
                else:
                    self._record(work, found)
            # All rows may have errors.
            self.finish_if_complete(work)

    def _take_answers(self, wait_s: float = 0.0) -> bool:
        """Go on with what the function has answered; waits so many seconds for the first. Whether it has."""
        if self._rollouts is None:
            return False
        answers = self._rollouts.answers(wait_s)
        self._plan.membership.heartbeat.wait_for(self._rollouts.num_waiting)
        for judged in answers:
            if (work := self._work_of(judged.request)) is not None:
                stats = self._stats_recorder.shard(work.shard)
                stats.num_rollout_calls += 1
                stats.rollout_ns += round(judged.seconds * NS_PER_S)
                self._go_on(work, self._rollouts.answered(judged, work.log))
        return bool(answers)

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
        self._num_running -= 1
        if (work := self._work_of(completion.request)) is not None:
            self._go_on(work, self._rows.end(completion, work.log))

    def _work_of(self, request: Request) -> Work | None:
        """It may have been dropped, and even leased again without a request for this row so far."""
        work = self._work.open.get(request.shard)
        return work if work is not None and request.row_id in work.begun else None

    def _go_on(self, work: Work, found: RowResult | Request | None) -> None:
        if isinstance(found, Request):
            work.following.append(found)
        elif found is not None:
            self._record(work, found)
            self.finish_if_complete(work)

    def close(self) -> None:
        """Release all unfinished shards; their recorded rows are kept."""
        if self._rollouts is not None:
            self._rollouts.close()
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


class WorkQueue:
    """The shards that are open in this replica, and what comes next.

    Shards are leased one after the other, each when all rows of the one before have begun, so rows of two
    shards may run at a time. A shard that another replica has taken over is dropped.

    Attributes:
        open: by shard.
        shards: the leases.
    """

    def __init__(
        self,
        plan: RunPlan,
        rows: RowRequests,
        owner: Recorder,
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


@contextlib.contextmanager
def _tolerating_a_full_disk(name: str) -> Iterator[None]:
    """Log an error on writing at the end, of which a full disk may be the reason: the leases must be released
    all the same, and only statistics are lost."""
    try:
        yield
    except UserError as error:
        logger.warning("the latest statistics of %s are lost: %s", name, error)
