"""Calls a user's function in processes of its own: whatever it does, the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specdist.rollout import Answer, failed
from specdist.utils.errors import UserError, first_line

MAX_IMPORT_S = 120.0
START = "import sys; sys.path[:] = {}; from specdist.rollouts.worker import main; main({}, {}, {!r})"
# No GPU, one thread, and none of the run's ranks.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "RANK": "0", "LOCAL_RANK": "-1", "WORLD_SIZE": "1",
}  # fmt: skip


class RolloutPool:
    """Up to ``num_workers`` processes, started as calls come; one that takes longer than ``timeout_s`` for a
    call is replaced. A thread of this process waits for each."""

    def __init__(self, function: str, *, num_workers: int, timeout_s: float) -> None:
        self._function, self._num_workers, self._timeout_s = function, num_workers, timeout_s
        self._calls: queue.SimpleQueue[tuple[Hashable, bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Hashable, Answer, float]] = queue.SimpleQueue()
        self._num_waiting = 0
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, _Worker] = {}
        self._starting, self._is_closed = threading.Lock(), False

    @property
    def num_waiting(self) -> int:
        """Calls that were submitted and not yet returned by :meth:`poll`."""
        return self._num_waiting

    def submit(self, key: Hashable, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Never waits."""
        self._num_waiting += 1
        try:
            self._calls.put((key, pickle.dumps((row, messages))))
        except Exception as error:
            self._answers.put((key, failed(f"the row cannot be sent to a process: {first_line(error)}"), 0.0))
        if len(self._threads) < min(self._num_waiting, self._num_workers):
            self._threads.append(threading.Thread(target=self._serve, name="rollout", daemon=True))
            self._threads[-1].start()

    def poll(self, wait_s: float = 0.0) -> list[tuple[Hashable, Answer, float]]:
        """Key, answer and seconds of each call that is answered. Waits at most so long for the first, and
        not if there is none to come."""
        found: list[tuple[Hashable, Answer, float]] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < self._num_waiting:
                found.append(self._answers.get(timeout=0.0 if found else wait_s))
        self._num_waiting -= len(found)
        return found

    def close(self) -> None:
        """End all processes, also those that the function has started."""
        with self._starting:
            self._is_closed = True
        for worker in list(self._workers.values()):
            worker.kill()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (call := self._calls.get()) is not None:
            key, content = call
            begun_s = time.monotonic()
            try:
                if worker is None:
                    worker = self._started()
                values, seconds = worker.ask(self._timeout_s, content)
                answer = Answer.from_json(values)
            except Exception as error:
                worker, answer, seconds = None, failed(str(error)), time.monotonic() - begun_s
                self._workers.pop(threading.get_ident(), None)
            self._answers.put((key, answer, seconds))
        if worker is not None:
            worker.end()

    def _started(self) -> _Worker:
        with self._starting:
            if self._is_closed:
                raise UserError("the run has ended")
            worker = self._workers[threading.get_ident()] = _Worker(self._function)
        worker.load()
        return worker


class _Worker:
    """A process, in a session of its own: Ctrl-C is for the run. It ends with the thread that starts it."""

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
        """Wait until it has imported the function; the sha256 of its file. Raises :class:`UserError` if it
        cannot be called."""
        refusal, digest = self.ask(MAX_IMPORT_S)
        if refusal is not None:
            self.end()
            raise UserError(refusal)
        return str(digest)

    def ask(self, within_s: float, content: bytes | None = None) -> Any:
        """What it sends next, after this content. Raises :class:`UserError` if nothing comes; it then has
        ended."""
        how = f"took longer than {within_s:g} s{' (--rollout_timeout)' if content else ''}"
        try:
            if content is not None:
                self._connection.send_bytes(content)
            if self._connection.poll(within_s):
                return json.loads(self._connection.recv_bytes())
            self.end()
        except (EOFError, OSError):
            how = f"ended its process: {self.end(wait_s=1.0)}"
        raise UserError(f"{'the rollout function' if content else 'its import'} {how}")

    def end(self, wait_s: float = 0.0) -> str:
        """Kill it, unless it ends within so many seconds; how it has ended."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self.kill()
        code = self._process.wait()
        return signal.strsignal(-code) or str(code) if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def check_function(function: str) -> str:
    """The sha256 of the file of a function, which a process imports. Raises :class:`UserError` if it cannot
    be called with a row and messages."""
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
