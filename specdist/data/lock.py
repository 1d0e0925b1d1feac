"""One writer per run folder: the ranks of a killed launcher may live on and meet their own relaunch."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from specdist.errors import UserError

LOCK_NAME = ".lock"


class FolderLock:
    """Held until :meth:`release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises :class:`UserError` if another process holds the lock, or the folder cannot be written."""
        self._path = folder / LOCK_NAME
        self._is_new = not self._path.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        except OSError as error:
            raise UserError(f"--output {folder} cannot be written: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"--output {folder} is being written by {holder}: wait until it has ended, or end it"
            ) from None
        except OSError:
            return  # a file system without locks: nothing can be said
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def withdraw(self) -> None:
        """Release, and leave no trace: the folder turned out not to be a run's."""
        if self._is_new:
            self._path.unlink(missing_ok=True)
        self.release()
