"""Rows in the format of GSM8K: references score 1, corrupted ones 0; the strict rule is the data set's."""

from __future__ import annotations

import time

import pytest

from specdist.results.evaluate.tasks.gsm8k import final_expression, score_answer
from specdist.results.evaluate.tasks.writing import value
from tests.results.evaluate.evaluating import evaluate, values
from tests.results.evaluate.files import FAILED, merged_file, run_folder

REFERENCES = [
    "It takes 2/2=<<2/2=1>>1 bolt.\nThat is 2+1=<<2+1=3>>3 bolts.\n#### 3",
    "The profit is 200,000-130,000=<<200000-130000=70000>>70,000.\n#### 70,000",
    "It fell by 7-12=-5 degrees.\n#### -5",
    "Half of it is .5\n#### .5",
]
FINAL = ["3", "70000", "-5", ".5"]
INPUTS = {"reference": REFERENCES, "final_answer": FINAL}


@pytest.mark.parametrize("column", [None, "reference"])
def test_references_score_1_and_corrupted_ones_0(tmp_path, column) -> None:
    right = merged_file(tmp_path / "right.arrow", INPUTS, REFERENCES)
    assert values(right, task="gsm8k", reference_column=column) == {"exact_match": 1, "strict_match": 1}
    wrong = merged_file(tmp_path / "wrong.arrow", INPUTS, [text + "1" for text in REFERENCES])
    assert values(wrong, task="gsm8k", reference_column=column) == {"exact_match": 0, "strict_match": 0}


@pytest.mark.parametrize(
    ("completion", "reference", "exact", "strict"),
    [
        ("The answer is $3.00.", "3", 1, 0),
        ("3 apples, then 4 in all.", "3", 0, 0),
        ("#### 3\n\nQuestion: another one\n#### 9", "3", 1, 1),
        ("#### $1,000", "1000", 1, 0),
        ("#### 1,000", "1000", 1, 1),
        ("#### 3.0", "3", 1, 0),
        ("no number", "0", 0, 0),
        ("", "0", 0, 0),
    ],
)
def test_the_number_that_counts_as_the_answer_is_found(completion, reference, exact, strict) -> None:
    found, _ = score_answer(completion, [reference], {})
    assert found == {"exact_match": exact, "strict_match": strict}


@pytest.mark.parametrize(
    "text",
    [
        "#### " + " " * 50_000 + "x",
        "answer is " + "9 eggs * " * 8000,
        r"\boxed{" * 20_000,
        "answer\n" * 10_000,
    ],
)
def test_a_text_that_repeats_itself_is_read_in_no_time(text) -> None:
    started = time.process_time()
    value(final_expression(text))
    assert time.process_time() - started < 5  # a form that tries every division of it takes hours


def test_rows_that_failed_count_as_wrong_and_are_named(tmp_path) -> None:
    path = merged_file(tmp_path / "run.arrow", INPUTS, [*REFERENCES[:3], FAILED])
    text, document = evaluate(path, task="gsm8k")
    assert document["metrics"]["exact_match"]["value"] == 0.75
    assert document["num_error_rows"] == 1 and document["errors"] == {FAILED["error"]: 1}
    assert "1 rows ended with an error and count as incorrect: 1 x the prompt has no tokens" in text


def test_every_prompt_counts_the_same(tmp_path) -> None:
    """Two samples of four prompts: 1, 1/2, 0 and 0 of them right."""
    right = list(REFERENCES)
    samples = [[right[0], right[0]], [right[1], "1"], ["1", "2"], ["3", "4"]]
    path = merged_file(tmp_path / "run.arrow", INPUTS, samples)
    document = evaluate(path, task="gsm8k")[1]
    assert document["metrics"]["exact_match"]["value"] == 1.5 / 4
    assert (document["num_rows"], document["metrics"]["exact_match"]["num_prompts"]) == (8, 4)


def test_completions_can_be_cut_at_a_stop_string(tmp_path) -> None:
    path = merged_file(tmp_path / "run.arrow", {"final_answer": ["3"]}, ["It is 3.\nNext: and 4?"])
    assert values(path, task="gsm8k")["exact_match"] == 0
    assert values(path, task="gsm8k", cut_at="\nNext:", overwrite=True)["exact_match"] == 1


@pytest.mark.parametrize("num_cut", [0, 2])
def test_completions_cut_by_a_length_limit_are_reported(tmp_path, num_cut) -> None:
    """An answer that was not reached counts as wrong, and the reader should know why."""
    rows = [{"completion": text} for text in REFERENCES * 3]
    for row in rows[:num_cut]:
        row["finish_reason"] = "length"
    path = run_folder(tmp_path / "run", {"final_answer": list(FINAL) * 3}, [*rows[:-1], FAILED])
    text, document = evaluate(path, task="gsm8k")
    assert document["num_cut_completions"] == num_cut
    told = f"{num_cut} of 11 completions ({num_cut / 11:.0%}) were cut by --max_new_tokens 8 or --max_seq_len"
    assert (told in text) == (num_cut > 0)
    # Above a tenth.
    assert ("WARNING: " + told in text) == ("raise --max_new_tokens" in text) == (num_cut == 2)
