"""The part log of a shard of a run on an object store: appended to in the spool, copied to the store.

A replica of the same machine goes on with the local log. One on another machine has the copy, which is made
again whenever the log has grown by a tenth, at most every half minute: all copies of a log together take
about eleven times its size.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from specdist.data.run.parts import PartLog
from specdist.data.store.storage import StorePath

COPY_INTERVAL_S, COPY_GROWTH = 30.0, 1.1

logger = logging.getLogger(__name__)


class StoredPartLog(PartLog):
    """See :class:`PartLog`."""

    def __init__(
        self,
        path: StorePath,
        local: Path,
        *,
        earlier: Sequence[Path] = (),
        beside: Sequence[Path] = (),
        rows: Collection[int] | None = None,
        is_complete: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``path``: of the copy, ``local``: of the log itself, and of earlier ones beside it.
        ``is_complete``: whether the shard is."""
        local.parent.mkdir(parents=True, exist_ok=True)
        logs = sorted(_logs_of_shard(local))
        own = [log for log in logs if _series(log) == _series(local) and log.name < local.name]
        others = [log for log in logs if _series(log) != _series(local)]
        # A copy is the beginning of its log.
        super().__init__(local, earlier=[*earlier, *own], beside=[*beside, *others], rows=rows, clock=clock)
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


def _series(log: Path) -> str:
    """The name of a log without its generation: what it is of, a shard or a split."""
    return re.sub(r"(\.\d{5,})?\.jsonl$", "", log.name)


def _logs_of_shard(log: Path) -> list[Path]:
    return list(log.parent.glob(f"{log.name.split('.')[0]}.*jsonl")) if log.parent.is_dir() else []
