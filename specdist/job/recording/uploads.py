"""Finished shards on their way to their files, beside the generation: on a disk or on an object store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from specdist.data.stats.rows import RowResult, shard_table
from specdist.data.stats.shard import Stats
from specdist.data.stats.traces import trace_table
from specdist.job.rows.row_results import count_rows
from specdist.job.run.preflight import RunPlan

# Shards whose upload has not ended are in memory: beyond so many, generation waits.
MAX_UPLOADS = 3


class Uploads:
    """Shards are published one after the other, in a thread of their own: the end of a shard takes as long as
    many passes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._running: deque[tuple[Future[bool], Callable[[bool], None]]] = deque()

    def __len__(self) -> int:
        """Uploads that :meth:`settle` has not seen the end of."""
        return len(self._running)

    def start(self, publish: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Call ``publish``; ``then`` gets its result, in the thread that calls :meth:`settle`."""
        self._running.append((self._pool.submit(publish), then))
        self.settle(max_running=MAX_UPLOADS)

    def settle(self, *, max_running: int | None = None) -> None:
        """See the end of uploads: of those that have ended, and so many that no more than ``max_running``
        are left. Raises what an upload has raised."""
        while self._running:
            is_awaited = max_running is not None and len(self._running) > max_running
            if not (is_awaited or self._running[0][0].done()):
                return
            future, then = self._running.popleft()
            then(future.result())

    def close(self) -> None:
        """Wait for the uploads, and see their end. Raises as :meth:`settle` does."""
        try:
            self.settle(max_running=0)
        finally:
            self._pool.shutdown()


class ShardWriter:
    """Gives the rows of a shard that is finished their file, with its statistics and its trace."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        is_traced: bool = False,
        is_exact: bool = True,
        column_options: Sequence[str] = (),
    ) -> None:
        """
        Args:
            column_options: those of the run that have columns of their own.
        """
        self._plan, self._is_traced, self._is_exact = plan, is_traced, is_exact
        self._column_options = column_options
        self.uploads = Uploads()

    def write(
        self,
        shard: int,
        results: list[RowResult],
        counted: Stats,
        *,
        num_samples: Sequence[int],
        is_held: Callable[[], bool],
        then: Callable[[bool], None],
    ) -> None:
        """Begin to.

        Args:
            counted: in this replica.
            num_samples: of every row of the shard.
            is_held: whether the shard is still this replica's.
            then: called once the shard is complete, with whether it is by this replica's files.
        """
        first, end = self._plan.shards.bounds(shard)
        inputs = self._plan.prompts.table(first, end)

        def publish() -> bool:
            """Publish in a thread of its own, which has the shard to itself."""
            table = shard_table(
                inputs, results, first_row=first, num_samples=num_samples, is_exact=self._is_exact,
                options=self._column_options,
            )  # fmt: skip
            replica = self._plan.membership.replica
            stats = {"exact": self._is_exact, "replica": replica, **count_rows(counted, results)}
            trace = None
            if self._is_traced:
                trace = trace_table((result.row_id, result.sample_index, result.trace) for result in results)
            return self._plan.folder.finish_shard(shard, table, stats, trace, is_held=is_held)

        self.uploads.start(publish, then)
