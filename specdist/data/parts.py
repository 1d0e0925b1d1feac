"""The rows of an unfinished shard, one checksummed line each, so that a crash loses none that was written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from specdist.data.files import fsync_folder, writing
from specdist.data.rows import RowResult

SYNC_INTERVAL_S = 1.0
LINE = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("(row|stats)":(.*)\})\n', re.DOTALL)


class PartLog:
    """Append-only log of finished rows and of the latest statistics.

    Opening keeps every line before the first bad one and cuts off the rest: a torn last line, or what a power
    loss left. A line has reached the kernel when its call returns, so it survives the end of the process;
    a power loss costs at most what was appended since the last :meth:`sync`, about a second.

    A disk that is full or gone raises :class:`UserError`; the lines before are kept.
    """

    def __init__(
        self,
        path: Path,
        *,
        earlier: Sequence[Path] = (),
        rows: range | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open or create the log; ``clock`` gives seconds.

        ``earlier``: logs of those who held the shard before, oldest first. They are read and left as they
        are, since one of them may still be appended to; of two results for a sample the oldest log's counts.
        ``rows``: those of the shard, without which others are taken, too: a log may have been renamed.
        """
        self.results: dict[tuple[int, int], RowResult] = {}
        """By (row_id, sample_index), in the order in which they were appended."""
        self._rows = rows
        self.stats: dict[str, Any] | None = None
        """The latest snapshot."""
        self._clock = clock
        for log in earlier:
            self._load(log)
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)
            self._num_bytes = self._load(path)
            self._file.truncate(self._num_bytes)
            fsync_folder(path.parent)
        self._synced_at = clock()

    def append(self, result: RowResult) -> None:
        """Record a finished completion; a second one of the same row and sample is ignored."""
        key = (result.row_id, result.sample_index)
        if key in self.results:
            return
        self._write_line(b'"row":' + result.to_json() + b"}")
        self.results[key] = result
        if self._clock() - self._synced_at >= SYNC_INTERVAL_S:
            self.sync()

    def snapshot(self, stats: dict[str, Any]) -> None:
        """Record the shard's statistics so far, which replace those recorded before."""
        self._write_line(b'"stats":' + json.dumps(stats).encode() + b"}")
        self.stats = stats

    def sync(self) -> None:
        """Make everything appended so far survive a power loss."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        self._synced_at = self._clock()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> PartLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, path: Path) -> int:
        """Read the valid lines; returns how many bytes they take."""
        num_bytes = 0
        for line, kind, content in _valid_lines(path):
            num_bytes += len(line)
            if kind == b"row":
                result = RowResult.from_json(content)
                if self._rows is None or result.row_id in self._rows:
                    self.results.setdefault((result.row_id, result.sample_index), result)
            else:
                self.stats = json.loads(content)
        return num_bytes

    def _write_line(self, content: bytes) -> None:
        line = b'{"crc32":"%08x",%s\n' % (zlib.crc32(content), content)
        with writing(self._path):
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except BaseException:
                # Lines after a torn one would be lost at the next opening.
                self._file.truncate(self._num_bytes)
                raise
        self._num_bytes += len(line)


def read_rows(paths: Iterable[Path]) -> list[RowResult]:
    """The rows of logs that may be somebody's, of each sample the first one; nothing is changed."""
    results: dict[tuple[int, int], RowResult] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            for _, kind, content in _valid_lines(path):
                if kind == b"row":
                    result = RowResult.from_json(content)
                    results.setdefault((result.row_id, result.sample_index), result)
    return list(results.values())


def _valid_lines(path: Path) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Every line before the first bad one, with its kind and content."""
    with path.open("rb") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if match is None or int(match[1], 16) != zlib.crc32(match[2]):
                return
            yield line, match[3], match[4]
