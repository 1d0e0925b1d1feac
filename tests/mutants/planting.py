"""Plant a fault in a copy of the repository, and see whether a test fails there.

The copy is in a temporary folder that is deleted; the working tree is only read. pytest runs in a process
forked from this one, which has imported the libraries but nothing of the package: a mutant then takes the
time of its tests, without six seconds of imports.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.mutant import REPOSITORY, Mutant, read_sources

# What tests import beside the package; an optional one may be missing.
LIBRARIES = (
    "torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama", "accelerate",
    "datasets", "pandas", "pyarrow", "yaml", "psutil",
)  # fmt: skip
COPIED = ("specdist", "tests", "jobs", "pyproject.toml", "README.md")
SHOWN_CHARACTERS = 3000
TIME_OUT = "time-out"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of tests ended.

    Attributes:
        killer: the first test that failed, or ``time-out``, or ``collection`` where the tests could not
            be imported; None if all passed.
        duration_s: of the run, in seconds.
        output: the end of what pytest wrote.
    """

    killer: str | None
    duration_s: float
    output: str


def import_libraries() -> None:
    """Import the libraries, so that forked processes need not."""
    # As tests/conftest.py, which comes later here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if shutil.which("nvidia-smi") is None:
        os.environ["TRITON_INTERPRET"] = "1"
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copy_repository(root: Path, mutant: Mutant | None) -> None:
    """A copy of what the tests need, with the fault planted. What has been compiled comes along."""
    for item in COPIED:
        source = REPOSITORY / item
        if source.is_dir():
            # Files that are being compiled get another name meanwhile.
            shutil.copytree(source, root / item, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(source, root / item)
    if mutant is not None:
        place, text = mutant.planted(read_sources())
        (root / place.path).write_text(text)


class Run:
    """pytest on a copy with the fault, until the first failure, in a process of its own."""

    def __init__(self, tests: Sequence[str], mutant: Mutant | None, *, limit_s: float) -> None:
        """``limit_s``: seconds after which the run is ended."""
        self._folder = tempfile.TemporaryDirectory(prefix="specdist-mutant-")
        root = Path(self._folder.name)
        copy_repository(root, mutant)
        self._words, self._killer = root / "words.txt", root / "killer.txt"
        self._process = multiprocessing.get_context("fork").Process(
            target=_pytest, args=(root, list(tests), self._words, self._killer)
        )
        self._limit_s = limit_s
        self._begun = time.monotonic()
        self._process.start()

    @property
    def is_over(self) -> bool:
        return not self._process.is_alive() or time.monotonic() - self._begun > self._limit_s

    def finish(self) -> Outcome:
        """Wait until it is over; ends every process that it has started and deletes the copy."""
        self._process.join(max(0.0, self._begun + self._limit_s - time.monotonic()))
        is_late = self._process.is_alive()
        # It leads a process group, which may outlive it if a test has left a process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        duration_s = time.monotonic() - self._begun
        words = self._words.read_text(errors="replace") if self._words.exists() else ""
        killer = None
        if self._killer.exists():
            # Whether its process ends after that does not matter.
            killer = self._killer.read_text()
        elif is_late:
            killer = TIME_OUT
        elif self._process.exitcode:
            killer = "collection"
        self._folder.cleanup()
        return Outcome(killer=killer, duration_s=duration_s, output=words[-SHOWN_CHARACTERS:])


class _FirstFailure:
    """A pytest plugin that records which test failed first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)


def import_from(root: Path) -> None:
    """Of a process that has been forked: what it imports of the package from now on is the copy's."""
    os.chdir(root)
    for name in [name for name in sys.modules if name.split(".")[0] in ("specdist", "tests")]:
        del sys.modules[name]
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != REPOSITORY]
    sys.path[:] = [str(root), *elsewhere]
    # Processes that a test starts import from the copy too.
    os.environ["PYTHONPATH"] = str(root)


def _pytest(root: Path, tests: list[str], words: Path, killer: Path) -> None:
    """In the forked process: import from the copy only, not from this working tree."""
    os.setsid()
    with words.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    import_from(root)
    arguments = [
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--rootdir",
        str(root),
    ]
    code = pytest.main([*arguments, *tests], plugins=[_FirstFailure(killer)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
