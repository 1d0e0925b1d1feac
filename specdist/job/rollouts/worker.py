"""A process that calls a user's function; :mod:`specdist.job.rollouts.pool` starts it.

It sends, as JSON, first why the function cannot be called or null, and its file's sha256; then, for each row
and conversation that it receives, the answer and the seconds that it took.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib
import inspect
import json
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specdist.rollout import Answer
from specdist.utils.errors import first_line

PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, function: str) -> None:
    """Answer until the other end of the socket is closed, or the thread ends that started this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Signals to all processes of a job are for the run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(fd, False)
    connection, loop = Connection(fd), asyncio.new_event_loop()
    if os.getppid() != parent:
        return
    call, file, refusal = _load(function)
    digest = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
    connection.send_bytes(json.dumps([refusal, digest]).encode())
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # whatever threads the function has left
        begun_s = time.monotonic()
        try:
            found = call(*pickle.loads(received))
            if inspect.isawaitable(found):
                found = loop.run_until_complete(found)
            reason = f"it returned {found!r:.60}, which no function of specdist.rollout returns"
            is_answer = isinstance(found, Answer)
            answer = Answer.from_json(found.to_json()) if is_answer else Answer(kind="error", reason=reason)
        except BaseException as error:
            answer = Answer(kind="error", reason=_told(error, file))
        connection.send_bytes(json.dumps([answer.to_json(), time.monotonic() - begun_s]).encode())


def _load(function: str) -> tuple[Any, str | None, str | None]:
    """The function, its module's file, and why it cannot be called."""
    target, _, name = function.rpartition(":")
    path, folder = Path(target).resolve(), Path.cwd()
    if target.endswith(".py"):
        target, folder = path.stem, path.parent
        sys.modules.pop(target, None)
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(target)
    except BaseException as error:
        return None, None, f"its import failed: {_told(error, str(folder / f'{target}.py'))}"
    call: Any = getattr(module, name, None)
    file = getattr(module, "__file__", None)
    try:
        inspect.signature(call).bind({}, [])
    except (TypeError, ValueError) as error:
        return None, file, f"{target} has no function {name} of (row, messages): {error}"
    return call, file, None


def _told(error: BaseException, file: str | None) -> str:
    """An error's type and text, and the last line of the file that led to it, else of any."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    place = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
    return first_line(error)[:500].encode(errors="replace").decode() + place
