"""Answers as models write them, each labelled by reading it (answers.jsonl), and the values of numbers."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from specdist.results.evaluate.tasks.gsm8k import final_expression, score_answer
from specdist.results.evaluate.tasks.multiple_choice import chosen_letter
from specdist.results.evaluate.tasks.writing import value

ROWS = [
    json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()
]


def found(row: dict[str, Any]) -> tuple[Any, ...]:
    """What the task makes of a row of the table: the answer, and of numbers whether it is right."""
    if row["task"] == "multiple_choice":
        return (chosen_letter(row["completion"], row["choices"], len(row["choices"])),)
    metrics, texts = score_answer(row["completion"], [row["reference"]], row)
    return None if texts["answer"] is None else Fraction(texts["answer"]), metrics["exact_match"] == 1


def read_by_a_person(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["task"] == "multiple_choice":
        return (row["answer"],)
    return None if row["answer"] is None else Fraction(row["answer"]), row["is_right"]


@pytest.mark.parametrize(("task", "least"), [("gsm8k", 352), ("multiple_choice", 311)])
def test_answers_are_read_as_a_person_reads_them(task, least) -> None:
    """Those that are not say why, and are few: a change of a form shows in the answers that it changes."""
    rows = [row for row in ROWS if row["task"] == task]
    assert len(rows) >= least
    assert [row for row in rows if (found(row) == read_by_a_person(row)) == ("wrong" in row)] == []
    assert sum("wrong" in row for row in rows) <= 0.05 * len(rows)


NO_NUMBERS = [
    "18/0", "1/2/3", "1,2,3", "1,0000", "1.2.3.4", "5:30:15", "2024-01-15", "3-4", "3 - 4", "3~4", "3 to 4",
    "9 * 2", "16 - 7 =", "√16", "5√2", "12π + 4", "18±2", "2^3^4", "10^1000", "9" * 5000, "5'3",
    "2 hours 30 minutes", "x/4",
]  # fmt: skip
NUMBERS = {
    "2^-1": "1/2", "1e-2": "1/100", "1 000 000": "1000000", "0,125": "1/8", "1 1/2 million": "1500000",
    "3 x 10^-2": "3/100", "$1.5m": "1500000", "18 m": "18", "\uff15/\uff12": "5/2", "3 crore": "30000000",
    "-1 1/2": "-3/2", "12'345.5": "24691/2", "7-12 = -5": "-5", "18 = 9 * 2": "18", "99.5%": "199/2",
}  # fmt: skip
FORMS = ("{}", "The answer is {}.", "\\boxed{{{}}}", "#### {}", "答案是{}。")


@pytest.mark.parametrize("text", [*NO_NUMBERS, *NUMBERS])
def test_a_number_has_the_value_of_all_of_it_or_none(text) -> None:
    """In any form of an answer; a huge power or figure costs nothing."""
    right = NUMBERS.get(text)
    values = [value(final_expression(form.format(text))) for form in FORMS]
    assert values == [None if right is None else Fraction(right)] * len(FORMS)


def test_a_percentage_is_right_as_written_and_as_a_share() -> None:
    given = [score_answer("25%", [right], {})[0]["exact_match"] for right in ("25", "0.25", "1/4", "2.5")]
    assert given == [1, 1, 1, 0]


def test_the_unit_that_the_question_asks_for_is_no_factor() -> None:
    """The last question's: those of examples before it may be about others."""
    for prompt, right in (
        ("How many dozens?", "2"),
        ("How many dozen? 3. How many eggs?", "24"),
        (None, "24"),
    ):
        assert score_answer("2 dozen", [right], {"prompt": prompt})[0]["exact_match"] == 1
