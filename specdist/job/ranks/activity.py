"""What a rank is doing, and whether it makes progress: its phase, a count of steps, and its threads' stacks.

Every tensor that is loaded, every pass, and every 64 MiB that are read or written are steps. A rank that
loads slowly takes steps; a rank that waits for another, or for storage that does not respond, takes none.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from specdist.utils.documents import is_brief

STACKS_SIGNAL = signal.SIGUSR2
# Bytes read or written: a download or a checksum takes steps. Heartbeats and logs write far less.
BYTES_PER_STEP = 64 << 20
# Seconds of a phase before it is logged, and between two looks at it.
FIRST_LINE_S, LOOK_S = 1.0, 0.2

logger = logging.getLogger(__name__)


class Activity:
    """The activity of one rank. Any thread may count steps; the watchdog's thread reads them.

    Attributes:
        phase: completes "it hangs while ...".
        has_progress: the phase itself says how far it is.
        stacks: None in a world of one rank.
        on_phase: called when a phase begins.
        line: on a terminal, until a phase says itself how far it is.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.has_progress = False
        self.stacks: StackLog | None = None
        self.on_phase: Callable[[], None] | None = None
        self.line: tqdm[Any] = tqdm(disable=True)
        self._num_steps = 0
        self._stepped_at = time.monotonic()
        self._num_bytes = _num_bytes_moved()

    def begin(self, phase: str, *, has_progress: bool = False) -> None:
        """Begin a phase, such as "loading the draft"; messages name it if it never ends."""
        self.phase, self.has_progress = phase, has_progress
        if has_progress:
            self.line.close()
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


class PhaseLog:
    """Logs what a rank does while that takes longer than a second, and again when its time has doubled."""

    def __init__(self, activity: Activity, now_s: Callable[[], float] = time.monotonic) -> None:
        self._activity = activity
        self._now_s = now_s
        self._phase = ""
        self._began_s = self._next_s = 0.0
        self._is_closed = threading.Event()

    def watch(self) -> PhaseLog:
        """Watch in a thread of its own, until :meth:`close`."""
        self._activity.line = tqdm(bar_format="{desc}", leave=False, disable=not is_brief())
        threading.Thread(target=self._run, name="phases", daemon=True).start()
        return self

    def close(self) -> None:
        self._is_closed.set()
        self._activity.line.close()

    def look(self) -> None:
        """Log the phase if it is time to."""
        phase, now_s = self._activity.phase, self._now_s()
        if phase != self._phase:
            self._phase, self._began_s, self._next_s = phase, now_s, FIRST_LINE_S
        self._activity.line.set_description_str(f"{phase} ({now_s - self._began_s:.0f} s)")
        if now_s - self._began_s >= self._next_s and not self._activity.has_progress:
            self._next_s = 2 * (now_s - self._began_s)
            logger.info("%s (%.1f s so far)", phase, now_s - self._began_s)

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            self.look()


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
