"""Finished shards on their way to their files, beside the generation: on a disk or on an object store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

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
