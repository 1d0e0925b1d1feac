"""Real ranks that run case after case, see :mod:`tests.random_runs.ranks`."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.forked import World, started_world
from tests.random_runs.case import Case
from tests.random_runs.checking import Found
from tests.random_runs.jobs import JobCase, attempt_job
from tests.random_runs.trial import LIMIT_S, attempt
from tests.ranks import run_module

NUM_RANKS, POLL_S = 3, 0.002
SHOWN_CHARACTERS = 400


def write(path: Path, text: str) -> None:
    """At once: whoever sees the file can read all of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


class Worlds:
    """Runs cases: those of ranks in one world, which is started when it is first needed, and again after a
    failure of a rank; the others in this process."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._world: World | None = None
        self._folder = Path()
        self._number = 0

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def attempt(self, case: Case | JobCase) -> Found:
        if isinstance(case, JobCase):
            return attempt_job(case)
        if case.placement != "ranks":
            return attempt(case)
        if self._world is None:
            self._start()
        assert self._world is not None
        answer = self._folder / f"{self._number}.found"
        write(self._folder / f"{self._number}.case", case.line())
        self._number += 1
        end = time.monotonic() + 2 * LIMIT_S
        while not answer.exists() and self._world.is_running() and time.monotonic() < end:
            time.sleep(POLL_S)
        if answer.exists():
            found = Found(**json.loads(answer.read_text()))
        else:
            said = [words.strip()[-SHOWN_CHARACTERS:] for words in self._world.words("stderr")]
            why = "a rank has died" if not self._world.is_running() else f"no end within {2 * LIMIT_S} s"
            found = Found([f"{why}: {' | '.join(said)}"], is_broken=True)
        if found.is_broken:
            self._end()
        return found

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._folder, self._number = folder / "cases", 0
        self._folder.mkdir()
        environment = {"OMP_NUM_THREADS": "1", "RENDEZVOUS": f"file://{folder}/rendezvous"}
        self._world = self._stack.enter_context(
            started_world(
                NUM_RANKS, run_module, "tests.random_runs.ranks", str(self._folder), environment=environment
            )
        )

    def _end(self) -> None:
        self._stack.close()
        self._world = None
