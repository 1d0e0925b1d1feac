"""Tasks for lm-evaluation-harness on a local data set."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

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


def write_tasks(folder: Path) -> Path:
    """Two tasks that generate, each with its own options, and one that needs likelihoods."""
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
