"""What a rank is doing, and whether it makes progress: its phase, a count of steps, and its threads' stacks.

Every tensor that is loaded, every pass, and every 64 MiB that are read or written are steps. A rank that
loads slowly takes steps; a rank that waits for another, or for storage that does not respond, takes none.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

STACKS_SIGNAL = signal.SIGUSR2
# Bytes read or written: a download or a checksum takes steps. Heartbeats and logs write far less.
BYTES_PER_STEP = 64 << 20


class Activity:
    """The activity of one rank. Any thread may count steps; the watchdog's thread reads them.

    Attributes:
        phase: completes "it hangs while ...".
        stacks: None in a world of one rank.
        on_phase: called when a phase begins.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.stacks: StackLog | None = None
        self.on_phase: Callable[[], None] | None = None
        self._num_steps = 0
        self._stepped_at = time.monotonic()
        self._num_bytes = _num_bytes_moved()

    def begin(self, phase: str) -> None:
        """Begin a phase, such as "loading the draft"; messages name it if it never ends."""
        self.phase = phase
        self.step()
        if self.on_phase is not None:
            self.on_phase()

    def step(self) -> None:
        """Count a step: a tensor read, a pass run, a round ended."""
        self._num_steps += 1
        self._stepped_at = time.monotonic()

    def num_steps(self) -> int:
        """Steps so far, including those for bytes read and written."""
        num_bytes = _num_bytes_moved()
        if num_bytes - self._num_bytes >= BYTES_PER_STEP:
            self._num_bytes = num_bytes
            self.step()
        return self._num_steps

    @property
    def idle_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self._stepped_at


def _num_bytes_moved() -> int:
    """Bytes that this process has read and written; 0 where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


class StackLog:
    """Writes the stack traces of all threads, even while a library holds the interpreter's lock: on
    ``STACKS_SIGNAL``, on :meth:`write`, and if :meth:`expect_a_call` is not called again in time.

    Writes to stderr until :meth:`move_to`.
    """

    def __init__(self) -> None:
        self._file: TextIO | Any = None
        self._use(os.fdopen(os.dup(2), "a"))

    def move_to(self, path: Path) -> None:
        """Write into this file from now on."""
        self._use(path.open("a"))

    def _use(self, file: TextIO) -> None:
        # The old file stays open: a timer may still write into it.
        self._old, self._file = self._file, file
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)

    def write(self) -> None:
        """Write now. The handler runs in the calling thread, even if the main thread hangs."""
        sys.stderr.flush()
        signal.pthread_kill(threading.get_ident(), STACKS_SIGNAL)

    def expect_a_call(self, within_s: float) -> None:
        """Unless this method is called again in time, write the stacks and end the process with exit code 1.

        No Python code runs while a library holds the interpreter's lock, so only a C thread can do this.
        """
        faulthandler.dump_traceback_later(within_s, exit=True, file=self._file)

    def close(self) -> None:
        """Expect no more calls."""
        faulthandler.cancel_dump_traceback_later()
