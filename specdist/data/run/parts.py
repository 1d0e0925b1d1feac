"""The finished rows of an unfinished shard: a log of checksummed lines, which survives a crash."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdist.data.stats.rows import RowResult
from specdist.data.store.files import fsync_folder, writing
from specdist.data.store.storage import StorePath

SYNC_INTERVAL_S = 1.0
# The copies of a stored run's log: seconds between two, and how much the log grows.
COPY_INTERVAL_S, COPY_GROWTH = 30.0, 1.1
LINE = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("(row|note|stats)":(.*)\})\n', re.DOTALL)

# By (row_id, sample_index), in the order in which they were written.
Notes = dict[tuple[int, int], list[dict[str, Any]]]

logger = logging.getLogger(__name__)


class PartLog:
    """Append-only log of finished rows and of the latest statistics.

    Opening keeps all lines before the first bad one, such as a torn last line, and cuts off the rest. A line
    survives the end of the process; a power loss costs what was appended in about the last second. Then a
    thread of its own syncs the log, so that nobody waits for the disk. If the disk is full or gone,
    :class:`UserError` is raised, at the latest by the next call, and earlier lines are kept.
    """

    def __init__(
        self,
        path: Path,
        *,
        earlier: Sequence[Path] = (),
        rows: Collection[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open or create the log; ``clock`` gives seconds.

        ``earlier``: logs of previous holders of the shard, oldest first. They are only read, since one may
        still be appended to; of two results for a sample, that of the oldest log counts.
        ``rows``: those that belong here; others are ignored, since a log may have been renamed.
        """
        self.results: dict[tuple[int, int], RowResult] = {}
        """By (row_id, sample_index), in the order in which they were appended."""
        self.notes: Notes = {}
        """What had been noted of unfinished completions when the log was opened, by the same."""
        self.stats: dict[str, Any] | None = None
        """The latest snapshot."""
        self._clock = clock
        for log in earlier:
            self.stats = _load(log, self.results, rows, self.notes)[1] or self.stats
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)
            self._num_bytes, stats = _load(path, self.results, rows, self.notes)
            self.stats = stats or self.stats
            self._file.truncate(self._num_bytes)
            fsync_folder(path.parent)
        self._synced_at = clock()
        self._syncing: threading.Thread | None = None
        self._sync_error: OSError | None = None

    def append(self, result: RowResult) -> None:
        """Record a finished completion; a second one of the same row and sample is ignored."""
        key = (result.row_id, result.sample_index)
        if key in self.results:
            return
        self._write_line(b'"row":' + result.to_json() + b"}")
        self.results[key] = result
        if self._clock() - self._synced_at >= SYNC_INTERVAL_S:
            self.begin_sync()

    def note(self, row_id: int, sample_index: int, note: Mapping[str, Any]) -> None:
        """Record a step on the way to a completion, for a replica that goes on with it."""
        content = json.dumps({"row_id": row_id, "sample_index": sample_index, **note}, ensure_ascii=False)
        self._write_line(b'"note":' + content.encode("utf-8", "surrogatepass") + b"}")

    def snapshot(self, stats: dict[str, Any]) -> None:
        """Record the shard's statistics so far, which replace those recorded before."""
        self._write_line(b'"stats":' + json.dumps(stats).encode() + b"}")
        self.stats = stats

    def begin_sync(self) -> None:
        """Begin what :meth:`sync` does, unless it is under way."""
        if self._syncing is not None and self._syncing.is_alive():
            return
        self._end_sync()
        self._synced_at = self._clock()
        self._syncing = threading.Thread(target=self._sync, name="part log sync", daemon=True)
        self._syncing.start()

    def sync(self) -> None:
        """Make everything appended so far survive a power loss."""
        self._end_sync()
        self._sync()
        self._end_sync()
        self._synced_at = self._clock()

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._sync_error = error

    def _end_sync(self) -> None:
        """Wait until one that was begun is over. Raises :class:`UserError` if it has failed."""
        if self._syncing is not None:
            self._syncing.join()
        self._syncing, error, self._sync_error = None, self._sync_error, None
        with writing(self._path):
            if error is not None:
                raise error

    def keep(self) -> None:
        """Make everything appended so far available to the replica that goes on with the shard."""
        self.sync()

    def close(self) -> None:
        try:
            self._end_sync()
        finally:
            self._file.close()

    def __enter__(self) -> PartLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write_line(self, content: bytes) -> None:
        line = b'{"crc32":"%08x",%s\n' % (zlib.crc32(content), content)
        with writing(self._path):
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except BaseException:
                # After a torn line, later ones would be lost at the next opening.
                self._file.truncate(self._num_bytes)
                raise
        self._num_bytes += len(line)


def read_logs(paths: Iterable[Path]) -> tuple[list[RowResult], dict[str, Any] | None]:
    """The rows of logs that others may be writing, of each sample the first; and the last statistics."""
    results: dict[tuple[int, int], RowResult] = {}
    stats = None
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            stats = _load(path, results)[1] or stats
    return list(results.values()), stats


def _load(
    path: Path,
    results: dict[tuple[int, int], RowResult],
    rows: Collection[int] | None = None,
    notes: Notes | None = None,
) -> tuple[int, dict[str, Any] | None]:
    """Read up to the first bad line into ``results`` and ``notes``; returns the number of bytes and the last
    statistics."""
    num_bytes, stats = 0, None
    with path.open("rb") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if match is None or int(match[1], 16) != zlib.crc32(match[2]):
                break
            num_bytes += len(line)
            if match[3] == b"stats":
                stats = json.loads(match[4])
            elif match[3] == b"note":
                note = json.loads(match[4].decode("utf-8", "surrogatepass"))
                if notes is not None:
                    notes.setdefault((note.pop("row_id"), note.pop("sample_index")), []).append(note)
            else:
                result = RowResult.from_json(match[4])
                if rows is None or result.row_id in rows:
                    results.setdefault((result.row_id, result.sample_index), result)
    return num_bytes, stats


class StoredPartLog(PartLog):
    """The part log of a run on an object store: it grows in the cache directory and is copied to the store.

    A replica of the same machine goes on with the local log. One on another machine has the copy, which is
    made again whenever the log has grown by a tenth, at most every half minute: all copies of a log together
    take about eleven times its size.
    """

    def __init__(
        self,
        path: StorePath,
        local: Path,
        *,
        earlier: Sequence[Path] = (),
        rows: Collection[int] | None = None,
        is_complete: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``path``: of the copy, ``local``: of the log itself, and of earlier ones beside it.
        ``is_complete``: whether the shard is."""
        local.parent.mkdir(parents=True, exist_ok=True)
        own = sorted(log for log in _logs_of_shard(local) if log.name < local.name)
        # A copy is the beginning of its log.
        super().__init__(local, earlier=[*earlier, *own], rows=rows, clock=clock)
        self._copy, self._is_complete = path, is_complete
        self._copying: threading.Thread | None = None
        self._copied_bytes, self._copied_at = 0, clock()

    def begin_sync(self) -> None:
        super().begin_sync()
        is_due = self._clock() - self._copied_at >= COPY_INTERVAL_S
        if is_due and self._num_bytes >= COPY_GROWTH * self._copied_bytes and not self._is_copying:
            self._copied_bytes, self._copied_at = self._num_bytes, self._clock()
            self._copying = threading.Thread(target=self._try_to_copy, name="part log", daemon=True)
            self._copying.start()

    def keep(self) -> None:
        """Copy the log to the store."""
        self.sync()
        self._wait()
        self._try_to_copy()

    def close(self) -> None:
        self._wait()
        super().close()

    @property
    def _is_copying(self) -> bool:
        return self._copying is not None and self._copying.is_alive()

    def _wait(self) -> None:
        if self._copying is not None:
            self._copying.join()

    def _try_to_copy(self) -> None:
        try:
            self._copy.upload(self._path)
            # A replica that was paused meanwhile would leave a copy that nobody needs.
            if self._is_complete():
                self._copy.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "the rows finished so far could not be copied to %s (%s): only a replica on this machine can "
                "go on with them",
                self._copy,
                error,
            )


def forget_logs(log: Path) -> None:
    """Remove this machine's logs of a log's shard."""
    for path in _logs_of_shard(log):
        path.unlink(missing_ok=True)


def _logs_of_shard(log: Path) -> list[Path]:
    return list(log.parent.glob(f"{log.name.split('.')[0]}.*jsonl")) if log.parent.is_dir() else []
