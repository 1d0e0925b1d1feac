"""Being asked to stop: the first signal asks, and a second SIGINT does not ask.

The kernel's notice goes through a pipe to a thread, so that it arrives although the main thread is deep in a
library that waits for another rank.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from specdist.job.launcher import is_gone

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# The exit code of a job that was stopped on request and has not finished (EX_TEMPFAIL: try again).
EXIT_STOPPED = 75
# A launcher kills what has not ended 30 s after it has passed a signal on.
GRACE_S = 25.0
# One whose launcher has gone may be relaunched at any time, and would share its GPU with its successor.
ORPHAN_GRACE_S = 5.0
LAUNCHER_POLL_S = 0.5
# Slurm and the launcher may both pass on one and the same signal.
ECHO_S = 1.0

logger = logging.getLogger(__name__)


class StopRequest:
    """Whether the job has been asked to stop. To be made in the main thread, once per process.

    Until :meth:`defer_signals` there is nothing to lose, and the first signal ends the process at once. From
    then on it only sets :attr:`is_made`; a second SIGINT, a second later or more, ends the process, and so
    does the time limit if the process has not ended by itself. What was written down stays.

    The end of the process that has launched this one is a request to stop, too.
    """

    def __init__(self, on_look: Callable[[], None] | None = None, launcher: int | None = None) -> None:
        """
        Args:
            on_look: called whenever :attr:`is_made` is asked for; loops look before every round.
            launcher: its process id; see :mod:`specdist.job.launcher`.
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
        """There are rows to save: rounds have begun."""
        return self._defers_signals

    def defer_signals(self) -> None:
        """From here on there are rows to save."""
        self._defers_signals = True

    def close(self) -> None:
        """Put everything back as it was before."""
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
                    "not ended within the time that it was given: ending now; finished rows are kept, "
                    "and the same command goes on"
                )
                end_process(EXIT_STOPPED)
            if self._launcher is not None and is_gone(self._launcher):
                logger.warning(
                    "the launcher (process %d) is gone, killed or crashed: stopping, within %.0f s; start "
                    "the same command again to go on",
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
                logger.warning(
                    "%s with nothing to save yet: ending; the same command starts again", number.name
                )
                end_process(EXIT_STOPPED)
            if asked_at is None:
                asked_at = time.monotonic()
                ends_at = min(ends_at or math.inf, asked_at + GRACE_S)
                self._is_made.set()
                logger.warning(
                    "%s: stopping after this round; finished rows are kept; a second SIGINT ends at once",
                    number.name,
                )
            elif number == signal.SIGINT and time.monotonic() - asked_at >= ECHO_S:
                logger.warning(
                    "SIGINT again: ending at once; finished rows are kept, and the same command goes on"
                )
                end_process(128 + number)

    def _wait(self, ends_at: float | None) -> bytes | None:
        """The next signal's number; empty when there will be none, None when it is time to look around."""
        times = [] if ends_at is None else [max(0.0, ends_at - time.monotonic())]
        if self._launcher is not None:
            times.append(LAUNCHER_POLL_S)
        if not select.select([self._reader], [], [], min(times, default=None))[0]:
            return None
        return os.read(self._reader, 1)


def _note(number: int, frame: FrameType | None) -> None:
    """Python calls it when the main thread comes to it; the pipe is quicker."""
    del number, frame


def end_process(code: int) -> NoReturn:
    """At once, with all that was logged."""
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    os._exit(code)
