"""Being asked to stop: the first signal asks, and a second SIGINT does not ask.

The kernel's notice goes through a pipe to a thread, so that it arrives although the main thread is deep in a
library that waits for another rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# The exit code of a job that was stopped on request and has not finished (EX_TEMPFAIL: try again).
EXIT_STOPPED = 75
# A launcher kills what has not ended 30 s after it has passed a signal on.
GRACE_S = 25.0
# Slurm and the launcher may both pass on one and the same signal.
ECHO_S = 1.0

logger = logging.getLogger(__name__)


class StopRequest:
    """Whether the job has been asked to stop. To be made in the main thread, once per process.

    Until :meth:`become_gentle` there is nothing to lose, and the first signal ends the process at once. From
    then on it only sets :attr:`is_made`; a second SIGINT, a second later or more, ends the process, and so
    does the time limit if the process has not ended by itself. What was written down stays.
    """

    def __init__(self) -> None:
        # Loops look before every round: it goes on as long as this grows.
        self.num_looks = 0
        self._is_made = threading.Event()
        self._is_gentle = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _note) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    @property
    def is_made(self) -> bool:
        self.num_looks += 1
        return self._is_made.is_set()

    @property
    def is_gentle(self) -> bool:
        """There are rows to save: rounds have begun."""
        return self._is_gentle

    def become_gentle(self) -> None:
        """From here on there are rows to save."""
        self._is_gentle = True

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
        while True:
            left_s = None if asked_at is None else max(0.0, asked_at + GRACE_S - time.monotonic())
            if not select.select([self._reader], [], [], left_s)[0]:
                logger.warning("not ended %.0f s after it was asked to: ending now", GRACE_S)
                end_process(EXIT_STOPPED)
            received = os.read(self._reader, 1)
            if not received:
                return
            number = signal.Signals(received[0])
            if number not in STOP_SIGNALS:
                continue
            if not self._is_gentle:
                logger.warning("%s with nothing to save: ending", number.name)
                end_process(EXIT_STOPPED)
            if asked_at is None:
                asked_at = time.monotonic()
                self._is_made.set()
                logger.warning("%s: stopping after this round; a second SIGINT ends at once", number.name)
            elif number == signal.SIGINT and time.monotonic() - asked_at >= ECHO_S:
                logger.warning("SIGINT again: ending at once; finished rows are kept")
                end_process(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    """Python calls it when the main thread comes to it; the pipe is quicker."""
    del number, frame


def end_process(code: int) -> NoReturn:
    """At once, with all that was logged."""
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    os._exit(code)
