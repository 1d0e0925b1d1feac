"""The planted faults: each can be planted, the most dangerous are noticed, and survivors are reported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import REPOSITORY

NUM_DANGEROUS = 11
TIMEOUT_S = 280

# A mutant that changes nothing, one that never ends, one that is noticed, and one whose tests do not end the
# first time.
FOUR = """
import sys
from tests.mutants import __main__ as command
from tests.mutants.mutant import Mutant

def of(name, old, new):
    return Mutant(name=name, file="cache/pages.py", old=old, new=new, tests=("tests/cache/test_pages.py",))

command.MUTANTS = (
    of("harmless", "No tensors.", "No tensors!"),
    of("endless", "return -(-length // self.page_size)", "while True: pass"),
    of("noticed", "return -(-length // self.page_size)", "return length // self.page_size"),
    of("delayed", "return -(-length // self.page_size)",
       f"import pathlib, time; mark = pathlib.Path({sys.argv[1]!r}); "
       "mark.exists() or (mark.touch(), time.sleep(1000)); return length // self.page_size"),
)
command.import_libraries = lambda: None
command.LEAST_LIMIT_S = 2
sys.exit(command.main([]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_there_are_mutants_of_every_kind() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 40
    assert not [name for name in names if " " in name], "a name is one word of a command line"
    assert sum(mutant.is_dangerous for mutant in MUTANTS) == NUM_DANGEROUS


def _meaning(path: Path, text: str) -> str:
    """What comments and spaces do not change; of another language the text itself."""
    return ast.dump(ast.parse(text)) if path.suffix == ".py" else text


def test_every_mutant_can_be_planted() -> None:
    """Its text is in the code exactly once, the result is other code but valid, and its tests exist."""
    read = cache(lambda name: (REPOSITORY / name).read_text())
    syntax = cache(lambda path: _meaning(path, read(path)))
    wrong = []
    for mutant in MUTANTS:
        try:
            is_other_code = _meaning(mutant.path, mutant.planted(read(mutant.path))) != syntax(mutant.path)
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
            continue
        if not is_other_code or not mutant.tests:
            wrong.append(f"{mutant.name}: changes nothing, or has no tests")
        for test in mutant.tests:
            name, _, function = test.partition("::")
            exists = (REPOSITORY / name).exists()
            if not exists or (function and f"def {function.partition('[')[0]}(" not in read(name)):
                wrong.append(f"{mutant.name}: there is no test {test}")
    assert not wrong, "\n".join(wrong)


def test_survivors_and_endless_mutants_are_noticed_and_reported(tmp_path: Path) -> None:
    done = run("-c", FOUR, str(tmp_path / "mark"))
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {"planted": 4, "killed": 3, "survivors": ["harmless"]}, done
    assert done.returncode == 1
    names = ("harmless", "endless", "noticed", "delayed")
    fates = {name: line for line in lines for name in names if f"  {name}:" in line}
    assert "SURVIVES" in fates["harmless"] and "time-out" in fates["endless"]
    assert "killed by tests/cache/test_pages.py::" in fates["noticed"]
    assert "killed by tests/cache/test_pages.py::" in fates["delayed"], (
        "a time-out counts only when it comes again"
    )
    listed = run("-m", "tests.mutants", "--list").stdout
    assert all(mutant.name in listed for mutant in MUTANTS)


@pytest.mark.slow
def test_the_most_dangerous_are_noticed() -> None:
    """``python -m tests.mutants`` plants all others too. The suite itself runs the tests on sound code."""
    done = run("-m", "tests.mutants", "--dangerous", "--skip_sound")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"planted": NUM_DANGEROUS, "killed": NUM_DANGEROUS, "survivors": []}
    assert "time-out" not in done.stdout and "collection" not in done.stdout, done.stdout
