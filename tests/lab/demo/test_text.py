"""The demo's text: its sources, what is dropped, and how it is split."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specdist.lab.demo.text import Corpus, Document, drop_near_duplicates, load_corpus
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


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_this_python_has_enough_text(corpus: Corpus) -> None:
    assert len(corpus.training) > len(corpus.held_out) > 0
    assert sum(len(document.text) for document in corpus.training) > 500_000


def test_the_same_files_give_the_same_again() -> None:
    folder = Path(asyncio.__file__).parent
    first, second = (load_corpus(held_out_one_in=2, stdlib=folder) for _ in range(2))
    assert first.training and first.held_out
    assert first.fingerprint == second.fingerprint


def test_no_document_is_in_both_parts(corpus: Corpus) -> None:
    training = {document.text for document in corpus.training}
    assert training.isdisjoint(document.text for document in corpus.held_out)
    names = [document.name for document in corpus.training + corpus.held_out]
    assert len(set(names)) == len(names)


def test_docstrings_come_in_source_order_under_their_definitions(tmp_path: Path) -> None:
    corpus = load_corpus(held_out_one_in=1, stdlib=write_stdlib(tmp_path, ["apples"]))
    (document,) = corpus.held_out
    assert document.sections == (
        "A module about apples.",
        "class Thing(Base):\nWhat a thing is to apples.",
        "def act(self, times=2):\nAct on apples, that many times.",
    )


def test_missing_topics_tests_and_other_syntax_are_skipped(tmp_path: Path) -> None:
    stdlib = write_stdlib(tmp_path, ["kept", "test/left_out", "site-packages/left_out"])
    (stdlib / "python2.py").write_text("print 'no Python 3'")
    (stdlib / "undecodable.py").write_bytes(b"'\xff'")
    corpus = load_corpus(held_out_one_in=1, stdlib=stdlib)
    assert [document.name for document in corpus.held_out] == ["module kept.py"]


def test_topics_are_read_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'b': 'One.\\n\\nTwo.\\n', 'a': 'Three.'}")
    corpus = load_corpus(held_out_one_in=1, stdlib=tmp_path)
    assert corpus.held_out == (Document("topic a", ("Three.",)), Document("topic b", ("One.", "Two.")))


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        load_corpus(held_out_one_in=2, stdlib=tmp_path)


def test_of_near_duplicates_only_the_first_is_kept() -> None:
    sentence = "A generator yields each value of the iterable once, and then it stops for "
    first = Document("first", (sentence + "good.",))
    nearly = Document("nearly", (sentence + "ever.", "Something of its own."))
    copy = Document("copy", first.sections)
    assert drop_near_duplicates([first, nearly, copy]) == [
        first,
        Document("nearly", ("Something of its own.",)),
    ]
