"""Faults that are planted: each can be, those that are most dangerous are noticed, and survivors are told."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import REPOSITORY, Mutant

NUM_DANGEROUS = 10
TIMEOUT_S = 280

# One that changes nothing, one that never ends, and one that is noticed.
THREE = """
import sys
from tests.mutants import __main__ as command
from tests.mutants.mutant import Mutant

def of(name, old, new):
    return Mutant(name=name, file="cache/pages.py", old=old, new=new, tests=("tests/cache/test_pages.py",))

command.MUTANTS = (
    of("harmless", "No tensors.", "No tensors!"),
    of("endless", "return -(-length // self.page_size)", "while True: pass"),
    of("noticed", "return -(-length // self.page_size)", "return length // self.page_size"),
)
command.import_libraries = lambda: None
command.LEAST_LIMIT_S = 5
sys.exit(command.main(sys.argv[1:]))
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted(mutant: Mutant) -> None:
    """Its text stands in the code just once, the code is still Python, and its tests are there."""
    source = (REPOSITORY / mutant.path).read_text()
    planted = mutant.planted(source)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
    assert mutant.tests
    for test in mutant.tests:
        name, _, function = test.partition("::")
        path = REPOSITORY / name
        assert path.exists(), test
        assert not function or f"def {function.partition('[')[0]}(" in path.read_text(), test


def test_a_survivor_and_one_that_does_not_end_are_told() -> None:
    done = run("-c", THREE)
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {"planted": 3, "killed": 2, "survivors": ["harmless"]}, done
    assert done.returncode == 1
    fates = {
        name: line for line in lines for name in ("harmless", "endless", "noticed") if f"  {name}:" in line
    }
    assert "SURVIVES" in fates["harmless"] and "time-out" in fates["endless"]
    assert "killed by tests/cache/test_pages.py::" in fates["noticed"]
    listed = run("-m", "tests.mutants", "--list").stdout
    assert all(mutant.name in listed for mutant in MUTANTS)


@pytest.mark.slow
def test_the_most_dangerous_are_noticed() -> None:
    """All of them take ``python -m tests.mutants``, which is a command of its own."""
    done = run("-m", "tests.mutants", "--dangerous")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"planted": NUM_DANGEROUS, "killed": NUM_DANGEROUS, "survivors": []}
    assert "time-out" not in done.stdout and "collection" not in done.stdout, done.stdout
