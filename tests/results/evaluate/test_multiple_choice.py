"""Letters in every form that counts, references of every type, and what must not count."""

from __future__ import annotations

import time

import pytest

from specdist.results.evaluate.tasks.multiple_choice import chosen_letter, right_letter
from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import values
from tests.results.evaluate.files import merged_file

COLOURS = ["red", "blue", "green", "grey"]
NUMBERS = ["1", "0", "2", "30"]
OPTIONS = {"reference_column": "answer", "choices_column": "options"}


def test_a_choice_may_be_named_by_its_text() -> None:
    assert [chosen_letter(text, NUMBERS, 4) for text in ("0", "30.", "It is 0")] == ["B", "D", "B"]
    # Of texts within each other the longer; letters of names are none of the choices'.
    assert chosen_letter("dark red it is", ["red", "dark red"], 2) == "B"
    capitals = ["Paris", "Washington D.C.", "London", "Rome"]
    assert chosen_letter("Washington D.C., I think", capitals, 4) == "B"


def test_text_that_repeats_itself_is_read_in_no_time() -> None:
    for text in ("answer is " * 20_000, "option is (" * 20_000, "**" * 50_000, r"\boxed{" + " " * 50_000):
        started = time.process_time()
        chosen_letter(text, COLOURS, 4)
        assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("reference", "letter"),
    [
        (0, "A"),
        (1, "B"),
        (2.0, "C"),
        ("0", "B"),
        ("30", "D"),
        ("b", "B"),
        ("(B)", "B"),
        ("3", "D"),
        (True, "B"),
    ],
)
def test_a_number_is_a_place_and_a_text_a_text(reference, letter) -> None:
    """The texts are 1, 0, 2 and 30: only digits that are none of them are a place."""
    assert right_letter(reference, NUMBERS, 0) == letter


def test_references_that_are_all_letters_are_letters() -> None:
    """Blood groups: the second choice is the text A, and the third B."""
    groups = ["0", "A", "B", "AB"]
    assert right_letter("A", groups, 0, are_letters=True) == "A"
    assert right_letter("A", groups, 0) == "B"
    assert right_letter(True, ["False", "True"], 0) == "B" == right_letter(False, ["True", "False"], 0)
    assert right_letter("C.", [], 0) == "C"


@pytest.mark.parametrize(
    ("reference", "choices"),
    [("E", COLOURS), (4, COLOURS), (-1, COLOURS), (0.5, COLOURS), ("blue", []), (1, [])],
)
def test_a_reference_that_names_no_choice_is_refused(reference, choices) -> None:
    with pytest.raises(UserError, match="row 5: the reference"):
        right_letter(reference, choices, 5)


@pytest.mark.parametrize(
    ("references", "completions", "accuracy"),
    [
        # As in MMLU: places, beside choices that are numbers.
        ([0, 1, 2, 1], ["A", "B", "(C)", "The answer is 0"], 1),
        ([0, 1, 2, 1], ["B", "A", "D", "The answer is 1"], 0),
        (["0", "1", "2", "30"], ["B", "A", "C", "(d)"], 1),
        (["A", "B", "C", "D"], ["A", "B.", "**C**", "It is (D)"], 1),
    ],
)
def test_multiple_choice_scores_the_chosen_letters(tmp_path, references, completions, accuracy) -> None:
    path = merged_file(tmp_path / "run.arrow", {"answer": references, "options": [NUMBERS] * 4}, completions)
    assert values(path, task="multiple_choice", **OPTIONS) == {"accuracy": accuracy}


def test_choices_that_are_no_list_are_refused(tmp_path) -> None:
    for name, options in (("text", "A) red B) blue"), ("struct", {"text": ["red"], "label": ["A"]})):
        path = merged_file(tmp_path / f"{name}.arrow", {"answer": ["A"], "options": [options]}, ["A"])
        with pytest.raises(
            UserError, match=r"--choices_column options has type .* must have a list of texts"
        ):
            values(path, task="multiple_choice", **OPTIONS)
