"""Runs one case and says what is wrong with it, whatever happens."""

from __future__ import annotations

import contextlib
import logging
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.engine.harness import Harness
from tests.random_runs.case import Case
from tests.random_runs.checking import Found, check, is_independent, roomy, same_tokens
from tests.random_runs.running import run

LIMIT_S = 60


def attempt(case: Case, replica: Harness | None = None) -> Found:
    """``replica``: one that runs the case elsewhere."""
    try:
        with _limited():
            found_run = run(case, replica)
            found = check(case, found_run)
            found.num_preemptions = found_run.stats.num_preemptions
            if is_independent(case):
                found.wrong += same_tokens(found_run, run(roomy(case)))
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__)[-3:])
        place = " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        return Found([f"{type(error).__name__}: {error} ({place})"], is_broken=True)
    return found


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError in this thread, the main one, after too long a time; without warnings."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    # A link that breaks is logged, each time.
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
