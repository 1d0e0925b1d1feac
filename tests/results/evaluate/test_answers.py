"""Thinking is not the answer, in any task."""

from __future__ import annotations

import pytest

from specdist.results.evaluate.tasks.texts import answer_of, readings, without_thinking
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import merged_file, run_folder

THOUGHT = "<think>\nMaybe\n#### 5\nNo.\n</think>\n\n"


@pytest.mark.parametrize(
    ("completion", "prompt", "answer"),
    [
        (THOUGHT + "#### 18", "Q", "\n\n#### 18"),
        ("so 5</think>18", "Q", "18"),
        ("<think>a</think>no<think>b</think>18", "Q", "18"),
        ("<think>a</think>18<think>or is it", "Q", "18"),
        ("<think>so 5", "Q", ""),
        ("so 5", "Q<think>\n", ""),
        ("18", "Q<think>\n\n</think>\n\n", "18"),
        ("18", None, "18"),
    ],
)
def test_thinking_is_left_out(completion, prompt, answer) -> None:
    assert without_thinking(completion, prompt) == answer


def test_what_the_run_has_told_apart_counts() -> None:
    """A run with a marker of its own, which no reader could know."""
    row = {"prompt": "Q", "completion": "5 END 18; more", "completion_answer": "18; more"}
    assert answer_of(row, [";"]) == "18"
    assert answer_of({**row, "completion_answer": ""}, None) == ""


def test_the_next_question_ends_the_first_reading() -> None:
    assert readings("18\n\n**Question 2:** 7?\n9")[0] == "18\n"
    assert readings("Questions: none") == ["Questions: none"]


WRITTEN = "```python\ndef f():\n    return {}\n```\n"
TASKS = {
    "gsm8k": ("#### 5", "#### 18", {"reference": "#### 18"}, {}),
    "exact_match": ("Rome", "Paris", {"reference": "Paris"}, {}),
    "multiple_choice": ("Answer: A", "Answer: B", {"reference": "B"}, {}),
    "humaneval": (
        WRITTEN.format(1),
        WRITTEN.format(2),
        {"test": "def check(f):\n    assert f() == 2\n", "entry_point": "f"},
        {"allow_code_execution": True},
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_only_the_answer_counts_in_every_task(tmp_path, task) -> None:
    """A wrong thought before the right answer, the reverse, and a right thought without an end."""
    wrong, right, inputs, options = TASKS[task]
    thoughts = [f"<think>{wrong}</think>\n{right}", f"<think>{right}</think>\n{wrong}", f"<think>\n{right}"]
    columns = {name: [value] * 3 for name, value in inputs.items()}
    path = merged_file(tmp_path / "run.arrow", columns, thoughts)
    text, document = evaluate(path, task=task, **options)
    assert next(iter(document["metrics"].values()))["value"] == pytest.approx(1 / 3)
    assert "1 completions are thinking without an answer after it" in text


def test_answers_of_a_run_that_splits_thinking_are_read(tmp_path) -> None:
    results = [{"completion": "5 END 18", "completion_answer": "18", "completion_thinking": "5 "}]
    path = run_folder(tmp_path / "run", {"final_answer": ["18"]}, results)
    assert evaluate(path, task="gsm8k")[1]["metrics"]["exact_match"]["value"] == 1
