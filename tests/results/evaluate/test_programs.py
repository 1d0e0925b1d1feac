"""Programs of chat answers: the problem's imports and helpers belong to them."""

from __future__ import annotations

import pytest

from specdist.results.evaluate.tasks.humaneval import problem_code, program_of

PROBLEM = '''from typing import List


def poly(xs: List[float], x: float) -> float:
    """Evaluate."""
    return sum(c * x**i for i, c in enumerate(xs))


def total(xs: List[float]) -> float:
    """At 1.

    >>> total([1, 2])
    3
    """
'''
ROW = {
    "entry_point": "total",
    "test": "def check(f):\n    assert f([1, 2]) == poly([1, 2], 1)\n",
}
WHOLE = "def total(xs: List[float]) -> float:\n    return poly(xs, 1)\n"
BODY = "    return poly(xs, 1)\n"
ASKED = f"Complete this function.\n\n```python\n{PROBLEM}```\nThank you"
RIGHT = {
    "a fenced function": f"Here it is:\n\n```python\n{WHOLE}```\nIt sums.",
    "a fence without an end": f"```\n{WHOLE}",
    "a fence in a list": "1. So:\n   ```python\n"
    + "".join(f"   {line}\n" for line in WHOLE.splitlines())
    + "   ```",
    "the first of two": f"```python\n{WHOLE}```\nor worse\n```python\ndef total(xs):\n    return None\n```",
    "after another block": f"```python\nprint(1 / 0)\n```\nno:\n```python\n{WHOLE}```",
    "with its own helper": f"```python\ndef poly(xs, x):\n    return sum(xs)\n\n{WHOLE}```",
    "a function alone": WHOLE,
    "a body": BODY,
    "a body up to the end of a fence": f"{BODY}```\nThat is all",
}
WRONG = {
    "a wrong function": "```python\ndef total(xs):\n    return 0\n```",
    "words": "The function adds up all numbers.",
    "nothing": "",
}


def passes(program: str) -> bool:
    try:
        exec(program, {})  # the texts above
    except Exception:
        return False
    return True


@pytest.mark.parametrize("problem", [PROBLEM, problem_code(ASKED, "total")], ids=["prompt", "chat"])
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_answers_run_with_the_imports_and_helpers_of_the_problem(name, problem) -> None:
    assert passes(program_of(problem, {**RIGHT, **WRONG}[name], ROW)) == (name in RIGHT)


def test_a_continuation_is_joined_as_in_the_reference_implementation() -> None:
    row = {"entry_point": "f", "test": "T"}
    assert program_of("def f():\n    return ", "1\n", row) == "def f():\n    return 1\n\nT\ncheck(f)"


@pytest.mark.parametrize(
    "text",
    [
        ASKED,
        f"<|im_start|>user\n{PROBLEM}<|im_end|>\n<|im_start|>assistant\n",
        f"Please\n{PROBLEM}Fast.",
    ],
)
def test_the_code_of_a_problem_is_found_among_words_and_markers(text) -> None:
    assert problem_code(text, "total").strip() == PROBLEM.strip()


def test_a_problem_without_a_body_or_a_function_is_no_error() -> None:
    assert problem_code("Write this:\nimport math\ndef f(x):\n    # the root\n", "f") == (
        "import math\ndef f(x):\n    # the root\n    pass\n"
    )
    assert problem_code("Write f, which adds.", "f") == "" == problem_code("def f(:\n", "f")


def test_the_last_function_of_the_name_is_the_problems() -> None:
    """Of a chat whose system prompt, or an earlier message, has one too."""
    chat = f"<s>Write def total, such as\ndef total(): pass\n<user>\n{PROBLEM}<assistant>\n"
    assert problem_code(chat, "total").strip() == PROBLEM.strip()
