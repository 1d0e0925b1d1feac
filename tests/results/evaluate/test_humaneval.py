"""Rows in the format of HumanEval: references pass, corrupted ones do not, and pass@k is unbiased."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from specdist.results.evaluate.tasks.humaneval import pass_at_k
from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import FAILED, merged_file

PROMPTS = [
    'from typing import List\n\n\ndef double(numbers: List[int]) -> List[int]:\n    """Twice each."""\n',
    'def sign(number):\n    """-1, 0 or 1\n    >>> sign(-3)\n    -1\n    """\n',
    'def is_even(number):\n    """Whether it is."""\n',
]
REFERENCES = [
    "    return [2 * number for number in numbers]\n",
    "    return (number > 0) - (number < 0)\n",
    "    return number % 2 == 0\n",
]
TESTS = [
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n",
    "def check(candidate):\n    for number, right in ((5, 1), (0, 0), (-2, -1)):\n"
    "        assert candidate(number) == right\n",
    "def check(candidate):\n    assert candidate(2)\n    assert not candidate(3)\n",
]
NAMES = ["double", "sign", "is_even"]
INPUTS = {"prompt": PROMPTS, "test": TESTS, "entry_point": NAMES}
ALLOWED = {"task": "humaneval", "allow_code_execution": True}


def test_references_pass_and_corrupted_ones_do_not(tmp_path) -> None:
    right = merged_file(tmp_path / "right.arrow", INPUTS, REFERENCES)
    text, document = evaluate(right, **ALLOWED)
    assert document["metrics"]["pass@1"]["value"] == 1 and document["facts"]["outcomes"] == {"passed": 3}
    assert "programs: 3 passed" in text
    wrong = merged_file(
        tmp_path / "wrong.arrow", INPUTS, ["    return numbers\n", "    return 1\n", "    return (\n"]
    )
    document = evaluate(wrong, **ALLOWED)[1]
    assert document["metrics"]["pass@1"]["value"] == 0 and document["facts"]["outcomes"] == {"failed": 3}


def test_pass_at_k_is_the_share_of_all_choices_of_k() -> None:
    """Against every choice of k of n samples of which c pass, in exact fractions."""
    for n, k in itertools.product(range(1, 8), range(1, 8)):
        if k > n:
            continue
        for c in range(n + 1):
            choices = [any(choice) for choice in itertools.combinations([True] * c + [False] * (n - c), k)]
            expected = Fraction(sum(choices), len(choices))
            assert pass_at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(float(expected), abs=1e-12)


def test_samples_of_a_prompt_give_pass_at_k(tmp_path) -> None:
    """2, 1 and 0 of 3 pass, so that pass@2 is (1 + 2/3 + 0) / 3; a row that failed is not run."""
    wrong = "    return None\n"
    samples = [
        [REFERENCES[0], wrong, REFERENCES[0] + "\n"],
        [REFERENCES[1], wrong, FAILED],
        [wrong, wrong, wrong],
    ]
    path = merged_file(tmp_path / "run.arrow", INPUTS, samples)
    document = evaluate(path, k=[1, 2, 3], **ALLOWED)[1]
    found = {name: metric["value"] for name, metric in document["metrics"].items()}
    assert found == pytest.approx({"pass@1": 1 / 3, "pass@2": (1 + 2 / 3) / 3, "pass@3": 2 / 3})
    assert document["facts"]["outcomes"] == {"passed": 3, "failed": 5, "not run": 1}
    with pytest.raises(
        UserError, match="--k 4 needs at least as many samples per prompt, and this run has 3"
    ):
        evaluate(path, k=[4], overwrite=True, **ALLOWED)


@pytest.mark.parametrize("has_problem", [True, False])
def test_the_problem_of_a_chat_answer_is_found(tmp_path, has_problem) -> None:
    """In the prompt that a template has made, or nowhere: then its import is missing."""
    inputs = {"test": TESTS[:1], "entry_point": NAMES[:1], "messages": [[{"role": "user", "content": "?"}]]}
    answer = "```python\ndef double(numbers: List[int]):\n    return [2 * n for n in numbers]\n```"
    prompt = f"<user>Complete:\n{PROMPTS[0] if has_problem else '...'}<assistant>"
    path = merged_file(tmp_path / "run.arrow", inputs, [{"completion": answer, "prompt": prompt}])
    assert evaluate(path, **ALLOWED)[1]["metrics"]["pass@1"]["value"] == has_problem


def test_code_is_run_only_with_the_users_consent(tmp_path) -> None:
    path = merged_file(tmp_path / "run.arrow", INPUTS, REFERENCES)
    with pytest.raises(UserError, match="add --allow_code_execution"):
        evaluate(path, task="humaneval")
    other = merged_file(tmp_path / "other.arrow", {"prompt": PROMPTS, "test": TESTS}, REFERENCES)
    with pytest.raises(UserError, match=r"needs the column entry_point, which .* it has test \(string\)"):
        evaluate(other, **ALLOWED)
