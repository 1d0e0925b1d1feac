"""How lines, words, rooms and rounds are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import lines
from tests.lines import JOB, REACHED, SYNCHRONOUS, Tree, over_budget, report, tree_here

TEXTS = {
    "specdist/__init__.py": "",
    "specdist/llm.py": "from specdist.job.generate import run\n",
    "specdist/job/__init__.py": "",
    "specdist/job/generate.py": (
        "from specdist.engine import engine\n\n\ndef run() -> None:\n    import specdist.data.one\n"
    ),
    "specdist/engine/__init__.py": "",
    "specdist/engine/engine.py": "import torch\n\n\nclass Engine:\n    def step(self) -> None: ...\n\n",
    "specdist/engine/parts.py": "class Scheduler: ...\n\n\nclass Sequence: ...\n",
    "specdist/data/one.py": "from specdist.data import two\n",
    "specdist/data/two.py": "",
    "tests/test_a.py": "one\ntwo\n",
    "jobs/benchmarks/tables/a.md": "not a manual\n",
    "README.md": "three by hand\n<!-- a:begin -->\ntwo made\n<!-- a:end -->\n",
}


def test_everything_is_counted() -> None:
    tree = Tree(TEXTS)
    sizes = tree.sizes()
    assert (sizes.package_lines, sizes.test_lines) == (1 + 5 + 6 + 4 + 1, 2)
    assert (sizes.words, sizes.words_by_hand) == (11, 3)
    # All but the front door and the parts, also what is imported later.
    assert tree.closure(JOB) == {
        "specdist", "specdist.job", JOB, "specdist.engine", "specdist.engine.engine",
        "specdist.data.one", "specdist.data.two",
    }  # fmt: skip
    assert sizes.import_lines == 5 + 6 + 1
    assert (sizes.rooms, sizes.arrows) == (3, 3)
    assert tree.arrows() == {("llm", "job"), ("job", "engine"), ("job", "data")}


def test_a_round_is_what_defines_its_names_and_names_that_are_gone_are_told() -> None:
    files, unknown = Tree(TEXTS).defining(SYNCHRONOUS)
    assert files == {"specdist/engine/engine.py", "specdist/engine/parts.py"}, (
        "a file with two of them is one"
    )
    assert len(unknown) == len(SYNCHRONOUS.split()) - 3 and "DraftWorker" in unknown
    _, unknown = Tree(TEXTS | {"specdist/data/two.py": "Scheduler = 1\n"}).defining(SYNCHRONOUS)
    assert "Scheduler" in unknown, "two files define it"
    assert "DraftWorker" in report(Tree(TEXTS), None).split("too few: ")[1]


def test_what_is_over_its_budget_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert over_budget(REACHED) == []
    assert over_budget(replace(REACHED, arrows=REACHED.arrows + 1)) == [
        f"arrows: {REACHED.arrows + 1}, at most {REACHED.arrows}"
    ]
    monkeypatch.setattr(lines, "REACHED", replace(tree_here().sizes(), options=1))
    assert lines.main(["--check"]) == 1
    assert "options: " in capsys.readouterr().err
    monkeypatch.setattr(lines, "REACHED", tree_here().sizes())
    assert lines.main(["--check"]) == 0
