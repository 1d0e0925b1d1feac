"""Exporting the prompts of lm-evaluation-harness and scoring a run with its metrics; skipped without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from specdist.config.arguments import parse_arguments
from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.results import write_arrow
from specdist.results.evaluate.run import run_evaluation
from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import merged_file, run_folder
from tests.results.evaluate.harness_tasks import QUESTIONS


def export(tasks: Path, *names: str, **options: object) -> pa.Table:
    output = tasks.parent / "prompts.arrow"
    given = ["--lm_eval_export", *names, "--lm_eval_include", str(tasks), "--output", str(output)]
    run_evaluation(parse_arguments(EvaluateConfig, given))
    return pa.ipc.open_file(pa.memory_map(str(output))).read_all()


def test_prompts_are_exported_and_a_run_is_scored(tasks) -> None:
    """Two of three sums are right; text after a stop string of the task is not part of an answer."""
    prompts = export(tasks, "toy_sums")
    assert prompts["prompt"].to_pylist() == [f"Question: {a}+{b}?\nAnswer:" for a, b in QUESTIONS]
    options = yaml.safe_load((tasks.parent / "prompts.yaml").read_text())
    assert options == {"temperature": 0.0, "max_new_tokens": 8, "stop": ["\n", "Question:"]}
    inputs = prompts.to_pydict()
    answers = [" 2\n9", " it is 5", " 8"]
    run = run_folder(tasks.parent / "run", inputs, answers, stop=["\n", "Question:"])
    text, document = evaluate(run, task="lm_eval")
    assert document["facts"]["lm_eval"]["toy_sums"]["exact_match,number"] == pytest.approx(2 / 3)
    assert document["metrics"] == {
        "toy_sums: exact_match, number": {
            "value": pytest.approx(2 / 3),
            "interval": document["metrics"]["toy_sums: exact_match, number"]["interval"],
            "num_prompts": 3,
        }
    }
    assert "toy_sums: exact_match, number" in text
    refuse_other_options(tasks, inputs, answers)


def refuse_other_options(tasks: Path, inputs: dict, answers: list[str]) -> None:
    """Runs whose options differ from those of their tasks, and incomplete ones, are refused."""
    for name, value in (("max_new_tokens", 7), ("temperature", 1.0), ("stop", ["A"])):
        run = run_folder(tasks.parent / name, inputs, answers, **{name: value})
        with pytest.raises(UserError, match=r"generate with the \.yaml file"):
            evaluate(run, task="lm_eval")
    cut_short = {name: values[:2] for name, values in inputs.items()}
    run = merged_file(tasks.parent / "short.arrow", cut_short, answers[:2])
    with pytest.raises(UserError, match="document 2 of toy_sums, is not in the run"):
        evaluate(run, task="lm_eval")


def test_tasks_that_a_run_cannot_answer_are_refused(tasks) -> None:
    with pytest.raises(UserError, match="the tasks require different options; export them separately"):
        export(tasks, "toy_sums", "toy_long_sums")
    with pytest.raises(UserError, match="toy_likely_sums: the task requires likelihoods"):
        export(tasks, "toy_likely_sums")
    assert not (tasks.parent / "prompts.arrow").exists()


def test_without_the_package_the_message_names_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    write_arrow(tmp_path / "run.arrow", pa.table({"a": [1]}))
    path = merged_file(tmp_path / "run.arrow", {}, ["1"])
    with pytest.raises(UserError, match=r"pip install -e '\.\[harness\]'"):
        evaluate(path, task="lm_eval")
