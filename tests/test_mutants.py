"""The mutants: each can be planted, the most dangerous are noticed, and survivors are reported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import REPOSITORY, Mutant, Place, definitions, read_sources

# A fault that would silently bias output, planted in every run.
PLANTED = "recovered-token-drawn-from-targets-whole-distribution"
TIMEOUT_S = 280

# A mutant that changes nothing, one that never ends, and one that is noticed.
THREE = """
import sys
from tests.mutants import __main__ as command
from tests.mutants.mutant import Mutant

def of(name, where, old, new):
    return Mutant(name, where, old, new, ("tests/models/cache/test_pages.py",))

command.MUTANTS = (
    of("harmless", "pages", "No tensors.", "No tensors!"),
    of("endless", "PageTable.num_pages_for", "return -(-length // self.page_size)", "while True: pass"),
    of("noticed", "PageTable.num_pages_for", "-(-length // self.page_size)", "length // self.page_size"),
)
command.import_libraries = lambda: None
command.LEAST_LIMIT_S, command.LIMIT_RATIO = 2, 1
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
    assert PLANTED in {mutant.name for mutant in MUTANTS if mutant.is_dangerous}


def _meaning(path: Path, text: str) -> str:
    """What comments and spaces do not change; of another language the text itself."""
    return ast.dump(ast.parse(text)) if path.suffix == ".py" else text


def _around(place: Place, text: str) -> tuple[int, int]:
    """Where the module's own definition that holds a place begins and ends; without one, the whole text."""
    if place.path.suffix == ".py":
        for name, (begin, end) in definitions(text):
            if "." not in name and begin <= place.offset < end:
                return begin, end
    return 0, len(text)


def test_every_mutant_can_be_planted() -> None:
    """Its text is in the code exactly once, the result is other code but valid, and its tests exist."""
    read = cache(lambda name: (REPOSITORY / name).read_text())
    meaning = cache(_meaning)
    sources, wrong = read_sources(), []
    for mutant in MUTANTS:
        try:
            place, planted = mutant.planted(sources)
            text = sources[place.path]
            begin, end = _around(place, text)
            own = planted[begin : end + len(planted) - len(text)]
            is_other_code = meaning(place.path, own) != meaning(place.path, text[begin:end])
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


def test_a_mutant_is_found_by_what_holds_its_text_wherever_that_is(tmp_path: Path) -> None:
    """In the function of its name that holds the text once; two such functions need a module's name."""
    text = "LIMIT = 1\n\n\nclass A:\n    @property\n    def size(self) -> int:\n        return LIMIT\n"
    for name in ("rooms/one.py", "rooms/deep/two.py", "rooms/deep/code.c"):
        path = tmp_path / "specdist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if path.suffix == ".py" else "int LIMIT = 1;\n")

    def place(where: str, old: str) -> str:
        found, planted = Mutant("of a test", where, old, "2", ()).planted(read_sources(tmp_path))
        assert planted == (tmp_path / found.path).read_text().replace(old, "2")
        return found.path.name

    assert place("two.LIMIT", "1") == "two.py"
    assert place("one.A.size", "property") == place("one.A", "property") == place("one", "1") == "one.py"
    assert place("code.c", "1") == "code.c"
    (tmp_path / "specdist/rooms/one.py").write_text("")
    assert place("A.size", "return LIMIT") == place("LIMIT", "1") == "two.py"
    for where, old in (("size", "return"), ("A.size", "1"), ("two", "LIMIT"), ("rooms", "1")):
        with pytest.raises(ValueError, match=f"in 0 places called {where}, not in one: write it anew"):
            place(where, old)
    (tmp_path / "specdist/rooms/three.py").write_text(text)
    with pytest.raises(
        ValueError, match=r"in 2 places called LIMIT .*deep/two\.py, specdist/rooms/three\.py"
    ):
        place("LIMIT", "1")


def test_survivors_and_endless_mutants_are_noticed_and_reported() -> None:
    done = run("-c", THREE)
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {"planted": 3, "killed": 2, "survivors": ["harmless"]}, done
    assert done.returncode == 1
    names = ("harmless", "endless", "noticed")
    fates = {name: line for line in lines for name in names if f"  {name}:" in line}
    assert "SURVIVES" in fates["harmless"] and "time-out" in fates["endless"]
    assert "killed by tests/models/cache/test_pages.py::" in fates["noticed"]


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{mutant.name}  (" in listed for mutant in MUTANTS)


@pytest.mark.slow
def test_a_dangerous_one_is_noticed() -> None:
    """``python -m tests.mutants`` plants all others too. The suite itself runs the tests on sound code."""
    done = run("-m", "tests.mutants", "--skip_sound", "--only", PLANTED)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"planted": 1, "killed": 1, "survivors": []}
    assert "time-out" not in done.stdout and "collection" not in done.stdout, done.stdout
