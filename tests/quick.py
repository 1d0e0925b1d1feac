"""The tests of a change: ``python -m tests.quick`` runs what ``bash tests/run.sh --quick`` does after lint.

These are test files that were changed, those that import a changed module themselves or are called like it in
its room, and the unit tests of sampling, policies and the engine; without those that take long (``LONG`` and
``RARE`` in tests/conftest.py) unless they were changed. A change is what differs from where this branch left
``main`` (on ``main``: from the commit before), committed or not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import LONG, RARE
from tests.lines import commit_before
from tests.ranks import REPOSITORY
from tests.test_architecture import imported_modules, module_name

UNIT_TESTS = ("tests/sampling", "tests/policies", "tests/engine")


def changed_files(commit: str) -> list[Path]:
    """Python files that exist and differ from the commit's, or are new."""
    listed = _git("diff", "--name-only", commit) + _git("ls-files", "--others", "--exclude-standard")
    paths = sorted({REPOSITORY / name for name in listed if name.endswith(".py")})
    return [path for path in paths if path.is_file()]


def files_to_run(changed: list[Path]) -> list[str]:
    """Test files to run, by their paths in the repository."""
    tests = REPOSITORY / "tests"
    modules = {module_name(path) for path in changed}
    mirrors = {_mirror(path) for path in changed}
    skipped = {tests / name for name in LONG.keys() | RARE}
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        is_touched = _place(path) in mirrors or not modules.isdisjoint(imported_modules(path))
        if path in changed or (path not in skipped and (_is_unit_test(path) or is_touched)):
            found.append(path.relative_to(REPOSITORY).as_posix())
    return found


def _place(path: Path) -> tuple[str, str]:
    """The room, and the file's name."""
    return path.relative_to(REPOSITORY).parts[1], path.name


def _mirror(path: Path) -> tuple[str, str]:
    """The place of the test file that is called like this one."""
    room, name = _place(path)
    return room, f"test_{name}"


def _is_unit_test(path: Path) -> bool:
    return path.relative_to(REPOSITORY).as_posix().startswith(UNIT_TESTS)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main() -> int:
    changed = changed_files(commit_before() or "HEAD")
    typed = [str(path) for path in changed if (REPOSITORY / "specdist") in path.parents]
    # Beside the tests: types take a core for a while.
    types = subprocess.Popen([sys.executable, "-m", "mypy", *typed], cwd=REPOSITORY) if typed else None
    options = ["-q", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files_to_run(changed)], cwd=REPOSITORY, check=False
    )
    are_typed = types is None or types.wait() == 0
    return tests.returncode or int(not are_typed)


if __name__ == "__main__":
    sys.exit(main())
