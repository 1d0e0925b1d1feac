"""What a rank is doing, and whether it is getting on: its phase, a count of steps, and its threads' stacks.

A rank that waits for another one, or for a file server that does not answer, takes no step. One that loads
slowly does: every tensor, every pass and every so many bytes that are read or written are steps.
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
# Of files, read or written: a download or a checksum gets on. What a heartbeat and a log write is far less.
BYTES_PER_STEP = 64 << 20


class Activity:
    """Of one rank. Steps are counted from any thread, and read by the watchdog's.

    ``phase`` completes "it hangs while ...". ``stacks``: of a rank that is one of several. ``on_phase``:
    called when another phase begins, since no thread may come to tell of it later.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.stacks: StackLog | None = None
        self.on_phase: Callable[[], None] | None = None
        self._num_steps = 0
        self._stepped_at = time.monotonic()
        self._num_bytes = _num_bytes_moved()

    def begin(self, phase: str) -> None:
        """Say what comes next, such as "loading the draft": it is what a message names if it never ends."""
        self.phase = phase
        self.step()
        if self.on_phase is not None:
            self.on_phase()

    def step(self) -> None:
        """Something has been done: a tensor read, a pass run, a round ended."""
        self._num_steps += 1
        self._stepped_at = time.monotonic()

    def num_steps(self) -> int:
        """Steps so far, with those that only the process's own count of bytes shows."""
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
    """By this process, through files; 0 where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


class StackLog:
    """Writes where every thread of this process is, also while a library holds the interpreter: on
    ``STACKS_SIGNAL``, on :meth:`write`, and if :meth:`expect_a_call` was not called again in time.

    It writes to stderr until there is a log to write to.
    """

    def __init__(self) -> None:
        self._file: TextIO | Any = None
        self._use(os.fdopen(os.dup(2), "a"))

    def move_to(self, path: Path) -> None:
        """From here on into this file."""
        self._use(path.open("a"))

    def _use(self, file: TextIO) -> None:
        # The old one stays open: a timer may still write into it.
        self._old, self._file = self._file, file
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)

    def write(self) -> None:
        """Now, from any thread: the handler runs in the one that asks, whatever the main thread hangs in."""
        sys.stderr.flush()
        signal.pthread_kill(threading.get_ident(), STACKS_SIGNAL)

    def expect_a_call(self, within_s: float) -> None:
        """Unless this method is called again in time, write the stacks and end the process with exit code 1.

        No Python code runs while a library holds the interpreter, so nothing else can end such a process from
        within.
        """
        faulthandler.dump_traceback_later(within_s, exit=True, file=self._file)

    def close(self) -> None:
        """No more calls are expected."""
        faulthandler.cancel_dump_traceback_later()
