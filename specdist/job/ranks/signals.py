"""Requests to stop: signals, and the end of the launcher.

A signal reaches a thread through a pipe, since the main thread may be waiting inside a library.

A rank whose launcher has ended receives no more signals, and a relaunch would load a second copy of the
models beside it. So the thread polls the id of its parent process. The kernel's signal on a parent's death
(PR_SET_PDEATHSIG) is not used: it is sent when the parent's *thread* ends, and cannot be told from a signal
of a user.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from specdist.utils.polling import is_readable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# The exit code of a job that was stopped on request and has not finished (EX_TEMPFAIL: try again).
EXIT_STOPPED = 75
# A launcher kills processes that have not ended 30 s after it forwarded a signal.
GRACE_S = 25.0
# A rank without a launcher may be relaunched at any time, and would share its GPU with its successor.
ORPHAN_GRACE_S = 5.0
LAUNCHER_POLL_S = 0.5
# Slurm and the launcher may both forward the same signal.
ECHO_S = 1.0
# Set by torchrun, and by accelerate for several processes; by accelerate for one.
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")

logger = logging.getLogger(__name__)


class StopRequest:
    """Whether the job has been asked to stop. Create it in the main thread, once per process.

    Before :meth:`defer_signals` there is nothing to save, and the first signal ends the process at once.
    After it a signal only sets :attr:`is_made`; a second SIGINT, at least a second later, ends the process,
    and so does a time limit if the process has not ended by itself. Recorded rows are kept in every case.

    The end of the launcher is also a request to stop.
    """

    def __init__(self, on_look: Callable[[], None] | None = None, launcher: int | None = None) -> None:
        """
        Args:
            on_look: called on every read of :attr:`is_made`; loops read it before every round.
            launcher: its process id, see :func:`find_launcher`.
        """
        self._on_look = on_look
        self._launcher = launcher
        self._is_made = threading.Event()
        self._defers_signals = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _note) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    @property
    def is_made(self) -> bool:
        if self._on_look is not None:
            self._on_look()
        return self._is_made.is_set()

    @property
    def defers_signals(self) -> bool:
        """Whether rounds have begun, so that there are rows to save."""
        return self._defers_signals

    def defer_signals(self) -> None:
        """Wait with signals from now on, since there are rows to save."""
        self._defers_signals = True

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._writer)  # ends the thread
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        asked_at: float | None = None
        ends_at: float | None = None
        while True:
            if ends_at is not None and time.monotonic() >= ends_at:
                logger.warning(
                    "not ended in time: ending now; finished rows are kept; start the same command "
                    "again to resume"
                )
                end_process(EXIT_STOPPED)
            # A process whose parent has ended gets another parent.
            if self._launcher is not None and os.getppid() != self._launcher:
                logger.warning(
                    "the launcher (process %d) is gone, killed or crashed: stopping within %.0f s; start the "
                    "same command again to resume",
                    self._launcher,
                    ORPHAN_GRACE_S,
                )
                self._launcher = None
                if not self._defers_signals:
                    end_process(EXIT_STOPPED)
                ends_at = min(ends_at or math.inf, time.monotonic() + ORPHAN_GRACE_S)
                self._is_made.set()
            received = self._wait(ends_at)
            if received is None:
                continue
            if not received:
                return
            number = signal.Signals(received[0])
            if number not in STOP_SIGNALS:
                continue
            if not self._defers_signals:
                logger.warning("%s with nothing to save yet: ending", number.name)
                end_process(EXIT_STOPPED)
            if asked_at is None:
                asked_at = time.monotonic()
                ends_at = min(ends_at or math.inf, asked_at + GRACE_S)
                self._is_made.set()
                logger.warning(
                    "%s: stopping after this round; finished rows are kept; a second SIGINT stops at once",
                    number.name,
                )
            elif number == signal.SIGINT and time.monotonic() - asked_at >= ECHO_S:
                logger.warning(
                    "SIGINT again: ending at once; finished rows are kept; start the same command again to "
                    "resume"
                )
                end_process(128 + number)

    def _wait(self, ends_at: float | None) -> bytes | None:
        """The next signal's number; empty once the pipe is closed, None when something else is due."""
        times = [] if ends_at is None else [max(0.0, ends_at - time.monotonic())]
        if self._launcher is not None:
            times.append(LAUNCHER_POLL_S)
        if not is_readable(self._reader, min(times, default=None)):
            return None
        return os.read(self._reader, 1)


def _note(number: int, frame: FrameType | None) -> None:
    """Python calls it in the main thread, perhaps late: the thread reads the pipe instead."""


def find_launcher() -> int | None:
    """The process id of the launcher, this process's parent; None for a process that was started by hand,
    which may outlive its shell."""
    return os.getppid() if any(name in os.environ for name in LAUNCHER_VARIABLES) else None


def end_process(code: int) -> NoReturn:
    """End this process at once, after flushing the logs."""
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    os._exit(code)
