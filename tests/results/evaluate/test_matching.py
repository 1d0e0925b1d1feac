"""Exact match, plug-ins, and what packages compare."""

from __future__ import annotations

import json
import sys

import pytest

from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import evaluate, values
from tests.results.evaluate.files import FAILED, merged_file


def test_exact_match_of_one_or_several_references(tmp_path) -> None:
    inputs = {"reference": [["Paris", "paris, France"], ["Rome"], ["Bonn", None], ["Oslo"]]}
    path = merged_file(tmp_path / "run.arrow", inputs, [" Paris\n", "rome", "Bonn.", FAILED])
    assert values(path, task="exact_match") == {"exact_match": 0.25}
    assert values(path, task="exact_match", ignore_case=True, overwrite=True) == {"exact_match": 0.5}
    options = {"ignore_case": True, "ignore_punctuation": True, "overwrite": True}
    assert values(path, task="exact_match", **options) == {"exact_match": 0.75}


def test_rows_without_a_reference_are_left_out(tmp_path) -> None:
    path = merged_file(tmp_path / "run.arrow", {"answer": [7, None, 9]}, ["7", "8", "8"])
    text, document = evaluate(path, task="exact_match", reference_column="answer")
    assert document["metrics"]["exact_match"]["value"] == 0.5
    assert "1 rows have no reference and are left out" in text


PLUGIN = """
def words(row):
    return {"num_words": len(row["completion"].split()), "is_first": row["row_id"] == 0}
def number(row):
    return len(row["completion"])
def uneven(row):
    return {f"score_{row['row_id']}": 1.0}
def broken(row):
    return row["no such column"]
def infinite(row):
    return float("inf")
not_callable = 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> str:
    """A module with the user's scoring function, in the working folder."""
    (tmp_path / "specdist_test_scores.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "specdist_test_scores"
    sys.modules.pop("specdist_test_scores", None)


def test_a_users_function_scores_rows(tmp_path, plugin) -> None:
    path = merged_file(tmp_path / "run.arrow", {}, ["one two", "three", FAILED])
    assert values(path, task=f"{plugin}:words") == {"num_words": 1.0, "is_first": pytest.approx(1 / 3)}
    assert values(path, task=f"{plugin}:number") == {"score": 4.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("uneven", "row 1 has the scores"),
        ("broken", "row 0, sample 0: the function raised KeyError"),
        ("infinite", "score is inf, but must be a finite number"),
        ("absent", "cannot be loaded"),
        ("not_callable", "is not a function"),
    ],
)
def test_a_users_function_with_a_wrong_result_is_refused(tmp_path, plugin, function, message) -> None:
    path = merged_file(tmp_path / "run.arrow", {}, ["one two", "three"])
    with pytest.raises(UserError, match=message):
        evaluate(path, task=f"{plugin}:{function}")
    assert not (tmp_path / "run-evaluation").exists()


def test_rouge_scores_are_those_by_hand(tmp_path) -> None:
    """By hand: 'the cat sat' against 'the cat lay' shares 2 of 3 words, 1 of 2 pairs, and 2 in order."""
    pytest.importorskip("rouge_score", reason="the extra 'evaluate' is not installed")
    inputs = {"reference": ["the cat lay", "a b c d", "x y"]}
    path = merged_file(tmp_path / "run.arrow", inputs, ["the cat sat", "a b c d", FAILED])
    document = evaluate(path, task="rouge")[1]
    found = {name: metric["value"] for name, metric in document["metrics"].items()}
    assert found == pytest.approx({"rouge1": (2 / 3 + 1) / 3, "rouge2": 1.5 / 3, "rougeL": (2 / 3 + 1) / 3})
    several = merged_file(
        tmp_path / "several.arrow", {"reference": [["zzz", "the cat sat"]]}, ["the cat sat"]
    )
    assert values(several, task="rouge") == {"rouge1": 1, "rouge2": 1, "rougeL": 1}
    stems = merged_file(tmp_path / "stems.arrow", {"reference": ["running dogs"]}, ["run dog"])
    assert values(stems, task="rouge")["rouge1"] == 0
    assert values(stems, task="rouge", use_stemmer=True, overwrite=True)["rouge1"] == 1


MATH = {
    r"so \boxed{\frac{2}{4}}": r"\frac12", "The answer is $x^2+2x+1$.": r"so $\boxed{(x+1)^2}$", "0.5": "1/2",
    r"\boxed{(1, 2]}": "(1,2]", r"\boxed{\text{even}}": r"\text{even}",
}  # fmt: skip


def test_mathematics_is_compared_by_value(tmp_path) -> None:
    pytest.importorskip("math_verify", reason="the extra 'evaluate' is not installed")
    right = merged_file(tmp_path / "right.arrow", {"reference": [*MATH.values()]}, [*MATH])
    assert values(right, task="math") == {"accuracy": 1}
    answers = ["", r"\boxed{x}", r"\boxed{}", FAILED, "<think>0.5"]
    wrong = merged_file(tmp_path / "wrong.arrow", {"reference": ["1/2"] * 5}, answers)
    assert values(wrong, task="math") == {"accuracy": 0}
    empty = merged_file(tmp_path / "empty.arrow", {"reference": ["1", r"\boxed{}"]}, ["1", "1"])
    with pytest.raises(UserError, match=r"no expression in the reference .*boxed"):
        evaluate(empty, task="math")


@pytest.mark.parametrize(("task", "module"), [("rouge", "rouge_score.rouge_scorer"), ("math", "math_verify")])
def test_without_a_package_the_message_says_what_to_install(tmp_path, monkeypatch, task, module) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = merged_file(tmp_path / "run.arrow", {"reference": ["a"]}, ["a"])
    with pytest.raises(UserError, match=r"pip install -e '\.\[evaluate\]'"):
        evaluate(path, task=task)


def test_results_are_json_and_rows(tmp_path) -> None:
    """results.json is the printed document, and rows.arrow has every row."""
    import pyarrow as pa

    path = merged_file(tmp_path / "run.arrow", {"final_answer": ["1", "2"]}, ["1", "3"])
    document = evaluate(path, task="gsm8k")[1]
    folder = tmp_path / "run-evaluation" / "gsm8k"
    assert document.pop("output") == str(folder)
    assert document["options"] == {"reference_column": None, "cut_at": None}
    assert json.loads((folder / "results.json").read_text()) == document
    rows = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()
    assert rows.to_pydict() == {
        "row_id": [0, 1],
        "sample_index": [0, 0],
        "finish_reason": ["stop", "stop"],
        "answer": ["1", "3"],
        "exact_match": [1.0, 0.0],
        "strict_match": [0.0, 0.0],
    }
    before = (folder / "results.json").read_bytes()
    with pytest.raises(UserError, match=r"holds results.json already: .*--overwrite"):
        evaluate(path, task="gsm8k")
    assert (folder / "results.json").read_bytes() == before
