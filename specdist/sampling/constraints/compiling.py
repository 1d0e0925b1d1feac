"""Constraints of rows, compiled in a process of their own first: no constraint can end a run, whatever
llguidance makes of it (a crash, all memory, no end)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any

from specdist.sampling.constraints.constraint import Constraint, ConstraintError

# Limits of one constraint: seconds of computing, and bytes of memory, of which a thread's stack may be much
# smaller in a rank than that of a process.
MAX_SECONDS, MAX_MEMORY, MAX_STACK = 20, 2 << 30, 1 << 20
# Answers that are kept: many rows have the same constraint.
MAX_ANSWERS = 1024


class CompilingProcess:
    """Started when it is first asked; it ends with this process.

    It may take so many seconds of computing, and bytes, for one constraint.
    """

    def __init__(self, max_seconds: int = MAX_SECONDS, max_memory: int = MAX_MEMORY) -> None:
        self._limits = max_seconds, max_memory
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = lru_cache(MAX_ANSWERS)(self._asked)

    def grammar(self, constraint: Constraint) -> str:
        """The constraint's grammar, as :attr:`Constraint.grammar`. Raises :class:`ConstraintError`."""
        try:
            question = json.dumps([constraint.kind, constraint.value])
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"it is not JSON: {error}") from error
        grammar, reason = self._answer(question)
        if reason is not None:
            raise ConstraintError(reason)
        return grammar

    def _asked(self, question: str) -> tuple[str, str | None]:
        reason = ""
        # Twice: a process may also be ended from outside.
        for _ in range(2):
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, *map(str, self._limits)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(question.encode() + b"\n")
                self._process.stdin.flush()
            if answer := self._process.stdout.readline():
                grammar, error = json.loads(answer)
                return grammar, error
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            code = self._process.wait()
            self._process = None
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "", (
            f"llguidance cannot compile it: its process ended with {reason}. It may take "
            f"{self._limits[0]} seconds and {self._limits[1] >> 20} MiB: make it smaller"
        )


def _serve(questions: IO[str], max_seconds: int, max_memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for question in questions:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + max_seconds, most))
        answer: list[Any] = ["", None]
        try:
            answer[0] = Constraint(*json.loads(question)).grammar
        # Panics of the library are no Exceptions.
        except BaseException as error:
            answer[1] = str(error) or type(error).__name__
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # Signals to all processes of a job are for the run, which closes the questions when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(MAX_STACK)
    server = threading.Thread(target=_serve, args=(sys.stdin, *map(int, sys.argv[1:])))
    server.start()
    server.join()
