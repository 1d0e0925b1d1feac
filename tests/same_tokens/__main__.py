"""Run the same small jobs in another commit and here, on this machine, and compare what they wrote.

    python -m tests.same_tokens --with COMMIT [--only NAME ...] [--list]

Every file of rows has to have the same bytes. The commit's files go into a temporary folder. A run that is
killed there goes on here, too. The exit code is 0, or 1 where something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.same_tokens.cases import CASES, RESUMED, Case
from tests.same_tokens.comparing import first_difference
from tests.same_tokens.models import build_models

REPOSITORY = Path(__file__).parent.parent.parent
KILLED = -9


class Tree:
    """The files of a commit, or those here, and a process that runs their jobs."""

    def __init__(self, root: Path, folder: Path, models: Path) -> None:
        """``folder``: of its runs."""
        self.folder, self._models = folder, models
        environment = os.environ | {
            "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "runner.py"), str(root)]
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        package = self._answer()["tree"]
        assert Path(package).is_relative_to(root), f"{package} is not of {root}"

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run(self, case: Case, *, is_killed: bool = False) -> str | None:
        """None, or how the job failed. ``is_killed``: as soon as a file of rows is there."""
        output = self.folder / case.name
        arguments = [*case.arguments(str(self._models)), "--output", str(output)]
        asked = {
            "num_ranks": case.num_ranks, "output": str(output), "is_killed": is_killed, "arguments": arguments
        }  # fmt: skip
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._answer()
        if answer["code"] == (KILLED if is_killed else 0):
            return None
        return f"ended with {answer['code']} in {self.folder.name}\n{answer['words']}"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.same_tokens", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--with", dest="commit", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - {case.name for case in CASES}
    if unknown:
        parser.error(f"--only: there is no case {', '.join(sorted(unknown))}: see --list")
    cases = [case for case in CASES if not options.only or case.name in options.only]
    if options.list:
        print(*(f"{case.name} ({case.num_ranks}): {case.options}" for case in cases), sep="\n")
        return 0
    return compare(options.commit, cases)


def compare(commit: str, cases: Sequence[Case]) -> int:
    """Prints a line a case; returns the exit code."""
    begun, num_run, num_wrong = time.monotonic(), 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="specdist-tokens-") as name,
        trees(Path(name), commit) as (there, here),
    ):
        for case, wrong in _results(cases, there, here):
            num_run, num_wrong = num_run + 1, num_wrong + (wrong is not None)
            print(f"{case.name}: {wrong or 'the same'}", flush=True)
    print(f"{num_wrong} of {num_run} differ from {commit}; {time.monotonic() - begun:.0f} s")
    return 1 if num_wrong else 0


@contextlib.contextmanager
def trees(folder: Path, commit: str) -> Iterator[tuple[Tree, Tree]]:
    """That of the commit, and this one."""
    build_models(folder / "models")
    (folder / "tree").mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", folder / "tree"], input=archive.stdout, check=True)
    roots = {"there": folder / "tree", "here": REPOSITORY}
    with ThreadPoolExecutor(2) as pool:
        there, here = pool.map(
            lambda name: Tree(roots[name], folder / name, folder / "models"), ("there", "here")
        )
    try:
        yield there, here
    finally:
        there.end()
        here.end()


def _results(cases: Sequence[Case], there: Tree, here: Tree) -> Iterator[tuple[Case, str | None]]:
    """Every case with what is wrong."""
    both = (there, here)
    with ThreadPoolExecutor(2) as pool:
        for case in cases:
            failures = list(filter(None, pool.map(Tree.run, both, (case, case))))
            folders = [tree.folder / case.name for tree in both]
            found = first_difference(*folders, of_tokens_alone=case.is_timed) if not failures else failures[0]
            yield case, found
    if RESUMED in cases:
        yield _resumed(there, here)


def _resumed(there: Tree, here: Tree) -> tuple[Case, str | None]:
    """A run that was killed there and goes on here."""
    case = dataclasses.replace(RESUMED, name=f"{RESUMED.name}-resumed")
    wrong = there.run(case, is_killed=True)
    if wrong is None:
        shutil.copytree(there.folder / case.name, here.folder / case.name)
        wrong = here.run(case) or first_difference(here.folder / RESUMED.name, here.folder / case.name)
    return case, wrong


if __name__ == "__main__":
    sys.exit(main())
