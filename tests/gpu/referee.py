"""The process that lets ranks begin a collective once all of its members are there, and a rank's line to it.

It runs beside the ranks, so that it outlives any of them: a :class:`Referee` in a thread of the test, a
:class:`Line` in every rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

from tests.gpu.meetings import Answers, Call, Meetings

ADDRESS = "FAKE_REFEREE"
# Far longer than a slow rank needs to arrive, far shorter than the job waits for one.
TIMEOUT_S = 60.0
# How long a rank may take to report where it is: its thread needs the interpreter for that.
ANSWER_S = 2.0
POLL_S = 0.5
REPOSITORY = Path(__file__).parents[2]
# Its calls of collectives are shown as well.
LIBRARY = "deepspeed"
# Frames of these files are left out of stacks.
OWN_FILES = ("tests/gpu/referee.py", "tests/gpu/process_groups.py", "tests/forked.py")


class Referee:
    """Of one world of ranks, which find it by the environment variable ``ADDRESS``."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """``timeout_s``: how long a rank may wait for another one."""
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="referee-")
        self._listener = Listener(str(Path(self._folder.name) / "socket"), family="AF_UNIX", backlog=64)
        self._meetings = Meetings()
        self._calls: dict[Connection, int] = {}
        self._questions: dict[int, Connection] = {}
        self._since: dict[int, float] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="referee", daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """For the ranks."""
        return {ADDRESS: str(self._listener.address)}

    @property
    def failure(self) -> str | None:
        """Why the ranks could not go on; None if they could."""
        return self._meetings.failure

    @property
    def counts(self) -> dict[int, Counter[tuple[str, str, str]]]:
        """By rank, how often it began, or tried to begin, each (operation, backend, group)."""
        return self._meetings.counts

    def close(self) -> None:
        """The ranks have ended."""
        self._is_closed = True
        # Wakes the thread.
        with contextlib.suppress(OSError):
            Client(str(self._listener.address)).close()
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()

    def _run(self) -> None:
        listening = self._listener._listener._socket  # type: ignore[attr-defined]
        while not self._is_closed:
            for ready in wait([listening, *self._calls], timeout=POLL_S):
                if ready is listening:
                    self._accept(self._listener.accept())
                else:
                    assert isinstance(ready, Connection)
                    self._hear(ready)
            self._look_at_the_clock()

    def _accept(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            purpose, rank = connection.recv()
            if purpose == "calls":
                self._calls[connection] = rank
                self._meetings.arrive(rank)
            else:
                self._questions[rank] = connection

    def _hear(self, connection: Connection) -> None:
        rank = self._calls[connection]
        try:
            call = connection.recv()
        except (EOFError, OSError):
            del self._calls[connection]
            self._answer(self._meetings.leave(rank))
            return
        self._since[rank] = time.monotonic()
        self._answer(self._meetings.enter(call))

    def _answer(self, answers: Answers) -> None:
        for connection, rank in self._calls.items():
            if rank in answers:
                with contextlib.suppress(OSError):
                    connection.send(answers[rank])

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for rank in self._meetings.waiting:
            if now - self._since[rank] > self._timeout_s:
                self._answer(self._meetings.fail(self._nobody_came(rank)))
                return

    def _nobody_came(self, rank: int) -> str:
        call, missing = self._meetings.waiting[rank], self._meetings.missing(rank)
        first = (
            f"rank {rank} has waited {self._timeout_s:g} s for rank {', '.join(map(str, missing))} "
            f"to begin {call}"
        )
        waiting = [other.with_stack() for other in self._meetings.waiting.values()]
        others = [self._whereabouts(other) for other in missing if other not in self._meetings.waiting]
        return "\n".join([first, *waiting, *others])

    def _whereabouts(self, rank: int) -> str:
        connection = self._questions.get(rank)
        if connection is None or rank not in self._calls.values():
            return f"rank {rank}: has ended, or never began"
        try:
            connection.send(None)
            if not connection.poll(ANSWER_S):
                return f"rank {rank}: does not say where it is"
            stack = connection.recv()
        except (EOFError, OSError):
            return f"rank {rank}: has ended"
        return "\n".join([f"rank {rank}: in no collective", *(f"    {line}" for line in stack)])


@contextlib.contextmanager
def refereed(timeout_s: float = TIMEOUT_S) -> Iterator[Referee]:
    """A referee for a world of ranks that begins and ends within the block."""
    referee = Referee(timeout_s)
    try:
        yield referee
    finally:
        referee.close()


class Line:
    """From a rank to the referee of its world."""

    def __init__(self, rank: int) -> None:
        address = os.environ[ADDRESS]
        self._calls, verify_input = Client(address), Client(address)
        self._calls.send(("calls", rank))
        verify_input.send(("questions", rank))
        main = threading.get_ident()
        # While the main thread is in whatever it does instead of a collective.
        threading.Thread(
            target=_tell_where, args=(verify_input, main), name="whereabouts", daemon=True
        ).start()

    def wait_for_the_others(self, call: Call) -> None:
        """Wait until all members make the same call. Raises RuntimeError if they never will."""
        try:
            self._calls.send(call)
            reason = self._calls.recv()
        except (EOFError, OSError):
            reason = f"the referee of the ranks has ended\n{call.with_stack()}"
        if reason is not None:
            raise RuntimeError(reason)


def _tell_where(verify_input: Connection, thread: int) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            verify_input.recv()
            verify_input.send(call_stack(sys._current_frames()[thread]))


def call_stack(frame: object = None) -> tuple[str, ...]:
    """The lines of the project that are running, the outermost first, and those of DeepSpeed."""
    found: list[str] = []
    current = frame if frame is not None else sys._getframe(1)
    while current is not None:
        code = current.f_code  # type: ignore[attr-defined]
        if (path := _short(code.co_filename)) is not None:
            found.append(f"{path}:{current.f_lineno} {code.co_name}")  # type: ignore[attr-defined]
        current = current.f_back  # type: ignore[attr-defined]
    return tuple(reversed(found))


def _short(path: str) -> str | None:
    """A file of the project or of DeepSpeed, without the folder that it is installed in; else None."""
    if path.startswith(str(REPOSITORY)):
        relative = path[len(str(REPOSITORY)) + 1 :]
        if relative not in OWN_FILES and not relative.startswith("."):
            return relative
    _, found, rest = path.rpartition(f"site-packages/{LIBRARY}/")
    return f"{LIBRARY}/{rest}" if found else None
