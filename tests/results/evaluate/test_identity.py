"""Comparing two runs: equal tokens, the first difference, and whether it was to be expected."""

from __future__ import annotations

import pyarrow as pa
import pytest

from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import FAILED, merged_file, run_folder


def ids(*tokens: int, **changes: object) -> dict[str, object]:
    return {"completion": " ".join(map(str, tokens)), "completion_ids": tokens, **changes}


FIRST = [ids(1, 2, 3), ids(1, 2, 3), ids(1, 2, 3), ids(1, 2, 3), ids(9, 9)]
SECOND = [ids(1, 2, 3), ids(1, 2, 4, 5), ids(1, 2), ids(1, 2, 3, finish_reason="length"), FAILED]


def test_every_kind_of_difference_is_counted(tmp_path) -> None:
    first = run_folder(tmp_path / "first", {}, FIRST)
    second = run_folder(tmp_path / "second", {}, SECOND)
    text, document = evaluate(first, against=second)
    found = document["identity"]
    assert (found["num_rows"], found["num_identical"], found["share_identical"]) == (5, 1, 0.2)
    assert found["kinds_of_difference"] == {"token": 1, "length": 2, "error": 1}
    # At positions 2, 2, 3 and 0.
    assert found["median_first_difference"] == 2
    assert "1 of 5 rows have the same tokens (20.00%)" in text
    folder = first / "evaluation" / "identity-against-second"
    rows = pa.ipc.open_file(pa.memory_map(str(folder / "differences.arrow"))).read_all().to_pydict()
    assert rows["difference"] == [None, "token", "length", "length", "error"]
    assert rows["first_difference"] == [None, 2, 2, 3, 0]


def test_a_run_is_the_same_as_itself(tmp_path) -> None:
    first = run_folder(tmp_path / "first", {}, FIRST)
    merged = merged_file(tmp_path / "merged.arrow", {}, FIRST)
    document = evaluate(first, against=merged)[1]
    assert document["identity"]["share_identical"] == 1
    assert document["identity"]["median_first_difference"] is None
    assert document["identity"]["settings_that_differ"] == []


def test_settings_that_differ_are_named(tmp_path) -> None:
    runs = [
        run_folder(tmp_path / name, {}, FIRST, **settings)
        for name, settings in (("first", {"seed": 7}), ("second", {"policy": "none"}))
    ]
    text, document = evaluate(runs[0], against=runs[1])
    assert document["identity"]["settings_that_differ"] == ["policy", "seed"]
    assert "the runs differ in policy, seed" in text


def test_runs_over_other_prompts_are_refused(tmp_path) -> None:
    first = merged_file(tmp_path / "first.arrow", {}, FIRST)
    second = merged_file(tmp_path / "second.arrow", {}, [*FIRST[:4], {**FIRST[4], "prompt": "another"}])
    with pytest.raises(UserError, match="row 4 has a different prompt there"):
        evaluate(first, against=second)


def test_scores_are_compared_prompt_by_prompt(tmp_path) -> None:
    """Only prompts of both runs count: 3 better, 1 worse, 1 equal, and one that only the first run has."""
    answers = {"final_answer": ["1"] * 6}
    first = merged_file(tmp_path / "first.arrow", answers, ["1", "1", "1", "0", "1", "0"])
    fewer = {"final_answer": ["1"] * 5}
    second = merged_file(tmp_path / "second.arrow", fewer, ["0", "0", "0", "1", "1"])
    text, document = evaluate(first, task="gsm8k", against=second)
    found = document["paired"]["exact_match"]
    assert (found["num_prompts"], found["num_better"], found["num_worse"]) == (5, 3, 1)
    assert found["difference"] == pytest.approx(4 / 5 - 2 / 5)
    low, high = found["interval"]
    assert -0.6 < low < 0 < found["difference"] < high <= 1
    assert document["metrics"]["exact_match"]["value"] == 4 / 6
    assert "3 / 1" in text


def test_a_column_missing_in_the_other_run_is_named_before_anything_is_run(tmp_path) -> None:
    first = merged_file(tmp_path / "first.arrow", {"final_answer": ["1"]}, ["1"])
    second = merged_file(tmp_path / "second.arrow", {}, ["1"])
    with pytest.raises(UserError, match=r"needs the column reference, which .*second.arrow does not have"):
        evaluate(first, task="gsm8k", against=second)


def test_a_lossy_run_says_so(tmp_path) -> None:
    path = run_folder(tmp_path / "run", {"final_answer": ["1"]}, ["1"], policy="sprinter")
    text, document = evaluate(path, task="gsm8k")
    assert document["exact"] is False and "NOT exact: a lossy run" in text
