"""The demo's text: its sources, and how it is split."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdist.lab.demo.pair import NUM_PROMPTS, cut_prompts, load_documents
from specdist.utils.errors import UserError

MODULE = '''"""A module about {name}."""

class Thing(Base):
    """What a thing is to {name}."""

    def act(self, times=2):
        """Act on {name}, that many times."""

def undocumented(): pass
'''


def write_stdlib(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE.format(name=name))
    return folder


def test_this_python_has_enough_text_and_each_is_in_one_part() -> None:
    training, held_out = load_documents()
    assert len(training) > len(held_out) > 0
    assert sum(len(section) for document in training for section in document) > 500_000
    assert set(training).isdisjoint(held_out)
    prompts, references = cut_prompts(held_out)
    assert len(prompts) == len(references) == len(set(prompts)) == NUM_PROMPTS


def test_docstrings_stand_under_their_names_and_other_files_are_skipped(tmp_path: Path) -> None:
    """Tests, installed packages, and what is not in this Python's syntax."""
    names = [f"kept{number}" for number in range(30)]
    stdlib = write_stdlib(tmp_path, [*names, "test/left_out", "site-packages/left_out"])
    (stdlib / "python2.py").write_text("print 'no Python 3'")
    (stdlib / "undecodable.py").write_bytes(b"'\xff'")
    training, held_out = load_documents(stdlib)
    assert len(training) + len(held_out) == 30 and (training, held_out) == load_documents(stdlib)
    (document,) = [each for each in training + held_out if each[0] == "A module about kept7."]
    assert document[1:] == ("Thing:\nWhat a thing is to kept7.", "act:\nAct on kept7, that many times.")
    assert cut_prompts(held_out) == ([], [])


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        load_documents(tmp_path)
