"""Calls a user's function in processes of its own: whatever it does, the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from specdist.rollout import Answer
from specdist.utils.errors import UserError, first_line

MAX_IMPORT_S = 120.0
START = "import sys; sys.path[:] = {}; from specdist.job.rollouts.worker import main; main({}, {}, {!r})"
# One thread, no GPU, and no part in the run's world.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "WORLD_SIZE"), "1")
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "-1"}


class RolloutPool:
    """Up to ``num_workers`` processes, started as calls come, each with a thread that waits for it. One that
    takes longer than ``timeout_s`` for a call is replaced. ``num_waiting`` calls were submitted and not yet
    returned by :meth:`poll`. A process gets its next call once what was returned before is used, so that at
    most one call of each is repeated after a crash."""

    def __init__(self, function: str, *, num_workers: int, timeout_s: float) -> None:
        self._function, self._num_workers, self._timeout_s = function, num_workers, timeout_s
        self._threads, self._of_thread = ThreadPoolExecutor(num_workers, "rollout"), threading.local()
        self._answers: SimpleQueue[tuple[Hashable, Answer, float]] = SimpleQueue()
        self._workers: set[_Worker] = set()
        self.num_waiting, self._is_closed = 0, False
        self._num_returned, self._used = 0, threading.Semaphore(0)

    def submit(self, key: Hashable, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Never waits."""
        self.num_waiting += 1
        try:
            self._threads.submit(self._call, key, pickle.dumps((row, messages)))
        except Exception as error:
            reason = f"the row cannot be sent to a process: {first_line(error)}"
            self._answers.put((key, Answer(kind="error", reason=reason), 0.0))

    def poll(self, wait_s: float = 0.0) -> list[tuple[Hashable, Answer, float]]:
        """Key, answer and the function's seconds of each call that is answered; those that the last poll gave
        are used by then. Waits at most so long for the first, and not if there is none to come."""
        for _ in range(self._num_returned):
            self._used.release()
        found: list[tuple[Hashable, Answer, float]] = []
        with contextlib.suppress(Empty):
            while len(found) < self.num_waiting:
                found.append(self._answers.get(timeout=0.0 if found else wait_s))
        self.num_waiting -= len(found)
        self._num_returned = len(found)
        return found

    def close(self) -> None:
        """End all processes, also those that the function has started."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._used.release(self._num_workers)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()

    def _call(self, key: Hashable, content: bytes) -> None:
        worker, begun_s = getattr(self._of_thread, "worker", None), time.monotonic()
        try:
            if worker is None:
                worker = _Worker(self._function)
                self._workers.add(worker)
                if self._is_closed:
                    worker.kill()
                worker.load()
                begun_s = time.monotonic()
            values, seconds = worker.ask(self._timeout_s, content)
            answer = Answer.from_json(values)
        except Exception as error:
            self._workers.discard(worker)
            answer, seconds = Answer(kind="error", reason=str(error)), time.monotonic() - begun_s
            worker = None
        self._of_thread.worker = worker
        self._answers.put((key, answer, seconds))
        self._used.acquire()


class _Worker:
    """A process in a session of its own: Ctrl-C is for the run. It ends with the thread that starts it."""

    def __init__(self, function: str) -> None:
        own, its = socket.socketpair()
        with own, its:
            start = START.format([str(path) for path in sys.path], its.fileno(), os.getpid(), function)
            # The run's stdout may be read by a program.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", start], env=os.environ | ENVIRONMENT, pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            )  # fmt: skip
            self._connection = Connection(own.detach())

    def load(self) -> str:
        """Wait for the import; its file's sha256. Raises :class:`UserError` if it cannot be called."""
        refusal, digest = self.ask(MAX_IMPORT_S)
        if refusal is not None:
            self.end()
            raise UserError(refusal)
        return str(digest)

    def ask(self, within_s: float, content: bytes | None = None) -> Any:
        """What it sends, after this content. Raises :class:`UserError` if nothing comes, and ends it."""
        what = "its import" if content is None else "the rollout function"
        try:
            if content is not None:
                self._connection.send_bytes(content)
            if self._connection.poll(within_s):
                return json.loads(self._connection.recv_bytes())
            self.end()
            how = f"took longer than {within_s:g} s{' (--rollout_timeout)' if content else ''}"
        except (EOFError, OSError):
            how = f"ended its process: {self.end(wait_s=1.0)}"
        raise UserError(f"{what} {how}")

    def end(self, wait_s: float = 0.0) -> str:
        """Kill it, unless it ends within so many seconds; how it has ended."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        code = self.kill()
        return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"

    def kill(self) -> int:
        """Kill it and what the function has started; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def check_function(function: str) -> str:
    """The sha256 of the file of a function. Raises :class:`UserError` if, in a process of its own, it cannot
    be imported and called with a row and messages."""
    target, _, name = function.rpartition(":")
    try:
        if not target or not name:
            raise UserError("it names no function")
        if target.endswith(".py") and not Path(target).is_file():
            raise UserError(f"there is no file {target}")
        worker = _Worker(function)
        digest = worker.load()
        worker.end()
    except UserError as error:
        form = "name path/file.py:function, or module:function of a module installed or in this folder"
        raise UserError(f"--rollout {function}: {error}; {form}") from error
    return digest
