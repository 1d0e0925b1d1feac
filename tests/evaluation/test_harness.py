"""Prompts of lm-evaluation-harness out, its metrics of a run in; skipped where it is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from specdist.arguments import parse_arguments
from specdist.errors import UserError
from specdist.evaluation.config import EvaluateConfig
from specdist.evaluation.results import write_arrow
from specdist.evaluation.run import run_evaluation
from tests.evaluation.evaluating import evaluate
from tests.evaluation.files import merged_file, run_folder

QUESTIONS = [(1, 1), (2, 3), (3, 4)]
TASK = {
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "num_fewshot": 0,
    "generation_kwargs": {"until": ["\n", "Question:"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        {"name": "number", "filter": [{"function": "regex", "regex_pattern": "(-?[0-9]+)"},
                                      {"function": "take_first"}]}
    ],
    "metadata": {"version": 1.0},
}  # fmt: skip


def require_package() -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks on a local data set: two that generate, and one that asks for likelihoods."""
    require_package()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [json.dumps({"question": f"{a}+{b}?", "answer": str(a + b)}) for a, b in QUESTIONS]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}}}
    longer = {**task["generation_kwargs"], "max_gen_toks": 9}
    likely = {"output_type": "multiple_choice", "doc_to_choice": ["1", "2"], "doc_to_target": 0}
    likely |= {"generation_kwargs": None, "filter_list": None, "metric_list": [{"metric": "acc"}]}
    variants = {"sums": {}, "long_sums": {"generation_kwargs": longer}, "likely_sums": likely}
    for name, changes in variants.items():
        values = {
            key: value
            for key, value in {**task, **changes, "task": f"toy_{name}"}.items()
            if value is not None
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return folder


def export(tasks: Path, *names: str, **options: object) -> pa.Table:
    output = tasks.parent / "prompts.arrow"
    given = ["--lm_eval_export", *names, "--lm_eval_include", str(tasks), "--output", str(output)]
    run_evaluation(parse_arguments(EvaluateConfig, given))
    return pa.ipc.open_file(pa.memory_map(str(output))).read_all()


def test_prompts_out_and_metrics_in(tasks) -> None:
    """Two of three sums right; what stands behind a stop string of the task is not part of an answer."""
    prompts = export(tasks, "toy_sums")
    assert prompts["prompt"].to_pylist() == [f"Question: {a}+{b}?\nAnswer:" for a, b in QUESTIONS]
    options = yaml.safe_load((tasks.parent / "prompts.yaml").read_text())
    assert options == {"temperature": 0.0, "max_new_tokens": 8, "stop": ["\n", "Question:"]}
    inputs = prompts.to_pydict()
    answers = [" 2\n9", " it is 5", " 8"]
    run = run_folder(tasks.parent / "run", inputs, answers, stop=["\n"])
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
    path = run / "evaluation" / "lm_eval" / "rows.arrow"
    rows = pa.ipc.open_file(pa.memory_map(str(path))).read_all().to_pydict()
    assert rows["value"] == [1.0, 1.0, 0.0] and rows["doc_id"] == [0, 1, 2]
    refuse_other_options(tasks, inputs, answers)


def refuse_other_options(tasks: Path, inputs: dict, answers: list[str]) -> None:
    """What a run had, and what its tasks want."""
    for name, value in (("max_new_tokens", 7), ("temperature", 1.0), ("stop", ["A"])):
        run = run_folder(tasks.parent / name, inputs, answers, **{name: value})
        with pytest.raises(UserError, match=r"generate with the \.yaml file"):
            evaluate(run, task="lm_eval")
    cut_short = {name: values[:2] for name, values in inputs.items()}
    run = merged_file(tasks.parent / "short.arrow", cut_short, answers[:2])
    with pytest.raises(UserError, match="document 2 of toy_sums is not in the run"):
        evaluate(run, task="lm_eval")


def test_tasks_that_a_run_cannot_answer_are_refused(tasks) -> None:
    with pytest.raises(UserError, match="the tasks want different options, export them apart"):
        export(tasks, "toy_sums", "toy_long_sums")
    with pytest.raises(UserError, match="toy_likely_sums: the task asks for likelihoods"):
        export(tasks, "toy_likely_sums")
    assert not (tasks.parent / "prompts.arrow").exists()


def test_without_the_package_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    write_arrow(tmp_path / "run.arrow", pa.table({"a": [1]}))
    path = merged_file(tmp_path / "run.arrow", {}, ["1"])
    with pytest.raises(UserError, match="pip install lm-eval"):
        evaluate(path, task="lm_eval")
