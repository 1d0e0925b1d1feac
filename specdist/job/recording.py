"""From completions to finished shards: a part log while rows finish, an Arrow file when a shard is complete.

Shards are claimed one after the other, each when the engine has taken all requests of the one before, so rows
of two shards may run at a time. A shard that another replica has taken over is dropped; completions of its
rows that are still running are not recorded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdist.data import PartLog, RowError, RowResult, ShardQueue, shard_table, trace_table
from specdist.data.shard_queue import ClaimedShard
from specdist.engine.faults import too_large
from specdist.engine.request import Completion, Request
from specdist.engine.stats_recorder import StatsRecorder
from specdist.job.preflight import ROWS_TOO_LARGE, RunPlan
from specdist.job.progress import Progress, Scalars
from specdist.job.tokens import PromptEncoder
from specdist.job.totals import write_total
from specdist.stats.shard import Stats
from specdist.utils.errors import UserError

SNAPSHOT_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass
class _OpenShard:
    claimed: ClaimedShard
    log: PartLog
    num_expected: int
    snapshot_at: float = 0.0


class Recorder:
    """Gives the engine its requests and records their completions; resumes unfinished shards."""

    def __init__(
        self,
        plan: RunPlan,
        encoder: PromptEncoder,
        stats_recorder: StatsRecorder,
        *,
        num_samples: int,
        progress: Progress,
        scalars: Scalars | None = None,
        is_traced: bool = False,
        is_exact: bool = True,
    ) -> None:
        self._too_large = {tuple(row) for row in plan.folder.manifest.info.get(ROWS_TOO_LARGE, [])}
        self._plan = plan
        self._encoder = encoder
        self._stats_recorder = stats_recorder
        self._num_samples = num_samples
        self._progress = progress
        self._scalars = scalars
        self._is_traced = is_traced
        self._is_exact = is_exact
        self._queue = ShardQueue(
            plan.folder,
            plan.membership,
            plan.manifest,
            plan.shards.num_shards,
            on_done_elsewhere=lambda shard: progress.skip(self._num_expected(shard)),
        )
        self._next: ClaimedShard | None = None
        self._open: dict[int, _OpenShard] = {}
        self._texts: dict[int, str] = {}

    @property
    def is_run_complete(self) -> bool:
        """Whether every shard is complete, here or in another replica."""
        return self._queue.is_done

    @property
    def poll_s(self) -> float:
        """Seconds to wait after :meth:`claim` found nothing."""
        return self._queue.poll_s

    def claim(self) -> bool:
        """Claim the next shard, unless one is claimed already; False if none is available now."""
        self._next = self._next or self._queue.take()
        return self._next is not None

    def requests(self) -> Iterator[Request]:
        """A request for every unfinished completion, shard after shard."""
        while self.claim():
            assert self._next is not None
            claimed, self._next = self._next, None
            yield from self._shard_requests(claimed)

    def _shard_requests(self, claimed: ClaimedShard) -> Iterator[Request]:
        shard = claimed.shard
        first, end = self._plan.shards.bounds(shard)
        log = self._queue.log(claimed, range(first, end))
        mine = self._open[shard] = _OpenShard(claimed, log, self._num_expected(shard))
        stats = self._stats_recorder.shard(shard)
        if log.stats is not None:
            stats.add(Stats.from_json(log.stats))
        _extend_to_now(stats)
        self._progress.skip(len(log.results))
        for row_id in range(first, end):
            samples = [sample for sample in range(self._num_samples) if (row_id, sample) not in log.results]
            if samples:
                yield from self._row_requests(shard, row_id, samples)
            if self._open.get(shard) is not mine:
                return
        # All rows may be finished already, or have errors.
        self._finish_if_complete(shard)

    def record(self, completion: Completion) -> None:
        """Record a finished completion; from now on it survives the end of this process."""
        request = completion.request
        # Its shard may have been dropped, and even claimed again without a request for this row so far.
        if request.shard not in self._open or request.row_id not in self._texts:
            return
        self._record(request.shard, _result(completion, self._texts[request.row_id]))
        self._finish_if_complete(request.shard)

    def close(self) -> None:
        """Release all unfinished shards; their recorded rows are kept."""
        try:
            for shard, open_shard in self._open.items():
                with open_shard.log as log, _tolerating_a_full_disk(shard):
                    log.snapshot(self._stats_recorder.shard(shard).to_json())
                    log.keep()
        finally:
            self._open.clear()
            self._queue.give_back()

    def _num_expected(self, shard: int) -> int:
        first, end = self._plan.shards.bounds(shard)
        return (end - first) * self._num_samples

    def _row_requests(self, shard: int, row_id: int, samples: list[int]) -> Iterator[Request]:
        text: str | None = None
        try:
            rendered = self._encoder.rendered(self._plan.prompts.prompt(row_id))
            text = rendered.text
            prompt_ids = self._encoder.token_ids(rendered)
        except RowError as error:
            for sample in samples:
                self._record(shard, _error_result(row_id, sample, text, error.reason))
            return
        self._texts[row_id] = text
        for sample in samples:
            if (row_id, sample) in self._too_large:
                reason = too_large("memory ran out in a replica that was generating it alone")
                self._record(shard, _error_result(row_id, sample, text, reason))
                continue
            yield Request(row_id=row_id, sample_index=sample, prompt_ids=prompt_ids, shard=shard)

    def _record(self, shard: int, result: RowResult) -> None:
        open_shard = self._open.get(shard)
        if open_shard is None:
            return
        open_shard.log.append(result)
        now = time.monotonic()
        if now - open_shard.snapshot_at >= SNAPSHOT_INTERVAL_S:
            open_shard.log.snapshot(self._stats_recorder.shard(shard).to_json())
            open_shard.snapshot_at = now
            if not self._queue.is_held(open_shard.claimed):
                self._drop(open_shard)
        self._progress.add(result)
        self._plan.membership.heartbeat.count(result.num_completion_tokens)

    def _drop(self, open_shard: _OpenShard) -> None:
        """Leave a shard to the replica that took it over because this one was silent for too long."""
        shard = open_shard.claimed.shard
        logger.warning("shard %d was taken over by another replica: it is no longer generated here", shard)
        del self._open[shard]
        open_shard.log.close()
        self._stats_recorder.close_shard(shard)
        self._forget_texts(shard)
        self._queue.lost(open_shard.claimed)

    def _finish_if_complete(self, shard: int) -> None:
        open_shard = self._open.get(shard)
        if open_shard is None or len(open_shard.log.results) < open_shard.num_expected:
            return
        first, end = self._plan.shards.bounds(shard)
        inputs = self._plan.prompts.table(first, end)
        del self._open[shard]
        results = list(open_shard.log.results.values())
        table = shard_table(
            inputs, results, first_row=first, num_samples=self._num_samples, is_exact=self._is_exact
        )
        counted = self._stats_recorder.close_shard(shard)
        _extend_to_now(counted)
        stats = {
            "exact": self._is_exact,
            "replica": self._plan.membership.replica,
            **count_rows(counted, results),
        }
        open_shard.log.close()
        trace = None
        if self._is_traced:
            trace = trace_table((result.row_id, result.sample_index, result.trace) for result in results)
        claimed = open_shard.claimed
        if self._plan.folder.finish_shard(
            shard, table, stats, trace, is_held=lambda: self._queue.is_held(claimed)
        ):
            self._queue.finished(claimed)
            write_total(self._plan.folder, shard, self._plan.shards.num_shards)
            if self._scalars is not None:
                self._scalars.shard_finished(self._progress.counts, shard, stats)
        else:
            logger.warning("shard %d was already completed by another replica; result discarded", shard)
            self._queue.lost(claimed)
        self._forget_texts(shard)

    def _forget_texts(self, shard: int) -> None:
        for row_id in range(*self._plan.shards.bounds(shard)):
            self._texts.pop(row_id, None)


@contextlib.contextmanager
def _tolerating_a_full_disk(shard: int) -> Iterator[None]:
    """Log an error on writing at the end, of which a full disk may be the reason: the claims must be released
    all the same, and only statistics are lost."""
    try:
        yield
    except UserError as error:
        logger.warning("the latest statistics of shard %d are lost: %s", shard, error)


def _extend_to_now(stats: Stats) -> None:
    """Extend the span of work on a shard; called when the work begins and when it ends."""
    now_ns = time.time_ns()
    stats.work_span.extend(now_ns, now_ns)


def count_rows(stats: Stats, results: list[RowResult]) -> dict[str, Any]:
    """A shard's statistics for its file. Counts of rows and tokens are taken from the rows themselves, since
    a crash may lose the statistics after the last snapshot, but no row."""
    errors = [result for result in results if result.finish_reason == "error"]
    stats.num_rows = len({result.row_id for result in results})
    stats.num_error_rows = len({result.row_id for result in errors})
    stats.num_completions = len(results) - len(errors)
    stats.num_cut_completions = sum(result.finish_reason == "length" for result in results)
    stats.num_prompt_tokens = sum(result.num_prompt_tokens for result in results)
    stats.num_completion_tokens = sum(result.num_completion_tokens for result in results)
    stats.close_shard()
    return stats.to_json()


def _result(completion: Completion, prompt: str) -> RowResult:
    request = completion.request
    if completion.error is not None:
        return _error_result(request.row_id, request.sample_index, prompt, completion.error)
    return RowResult(
        row_id=request.row_id,
        sample_index=request.sample_index,
        prompt=prompt,
        completion=completion.text,
        completion_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(request.prompt_ids),
        num_completion_tokens=len(completion.token_ids),
        num_spec_steps=completion.num_spec_steps,
        num_draft_tokens=completion.num_draft_tokens,
        num_accepted_draft_tokens=completion.num_accepted_draft_tokens,
        trace=completion.trace,
    )


def _error_result(row_id: int, sample: int, prompt: str | None, reason: str) -> RowResult:
    return RowResult(row_id=row_id, sample_index=sample, prompt=prompt, finish_reason="error", error=reason)
