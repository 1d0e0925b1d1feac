"""What the options of the evaluation refuse before anything is read or run."""

from __future__ import annotations

import pytest

from specdist.config.arguments import parse_arguments
from specdist.results.evaluate.config import OPTIONS_OF_TASKS, TASKS, EvaluateConfig
from specdist.results.evaluate.run import FUNCTIONS
from specdist.utils.errors import UserError
from tests.results.evaluate.evaluating import evaluate
from tests.results.evaluate.files import merged_file


def parse(*arguments: str) -> EvaluateConfig:
    return parse_arguments(EvaluateConfig, list(arguments), positional="run")


def test_every_task_has_a_scorer_and_every_option_a_task() -> None:
    assert set(FUNCTIONS) == {*TASKS, "plug-in"}
    assert all(set(tasks) <= set(FUNCTIONS) for tasks in OPTIONS_OF_TASKS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task gsm8k", "no run to evaluate"),
        ("run", "give --task .one of gsm8k, "),
        ("run --task gsm9k", "--task 'gsm9k' must be one of gsm8k, .*, or a function as module:function"),
        ("run --task gsm8k --use_stemmer", "--use_stemmer has no effect with --task gsm8k"),
        ("run --task humaneval --allow_code_execution --k 0", "must be at least 1"),
        ("run --task gsm8k --lm_eval_limit 3", "has no effect without --lm_eval_export"),
        ("--lm_eval_export a --output a.parquet", "needs --output, the .arrow file"),
    ],
)
def test_wrong_options_are_refused(arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        parse(*arguments.split())


def test_the_run_may_be_positional_or_named() -> None:
    assert parse("a", "--task", "gsm8k") == parse("--run", "a", "--task", "gsm8k")


def test_paths_without_a_run_are_refused(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "broken.arrow").write_bytes(b"ARROW1")
    (tmp_path / "folder").mkdir()
    found = {
        "absent": "no such file or folder",
        "folder": "is not the folder of a run",
        "text.txt": r"ends in .arrow or .parquet",
        "broken.arrow": "cannot be read",
    }
    for name, message in found.items():
        with pytest.raises(UserError, match=message):
            evaluate(tmp_path / name, task="gsm8k")


def test_every_merged_file_that_keeps_types_gives_the_same_scores(tmp_path) -> None:
    import pyarrow.parquet

    from specdist.data.run.merging import _write
    from tests.results.evaluate.files import table

    rows = table({"final_answer": ["1", "2"]}, ["1", "3"])
    for suffix in (".arrow", ".parquet"):
        with (tmp_path / f"run{suffix}").open("wb") as file:
            _write(file, rows.schema, iter([rows]), suffix)
        found = evaluate(tmp_path / f"run{suffix}", task="gsm8k", output=tmp_path / suffix)[1]
        assert found["metrics"]["exact_match"]["value"] == 0.5
    pyarrow.parquet.write_table(rows.drop_columns(["completion"]), tmp_path / "less.parquet")
    with pytest.raises(UserError, match=r"lacks columns of a run's output \(completion\)"):
        evaluate(tmp_path / "less.parquet", task="gsm8k")


def test_missing_columns_are_reported_with_the_existing_ones(tmp_path) -> None:
    path = merged_file(tmp_path / "run.arrow", {"label": ["1"], "n": [3]}, ["1"])
    with pytest.raises(UserError, match=r"column reference, .* it has label \(string\), n \(int64\)"):
        evaluate(path, task="exact_match")
    with pytest.raises(UserError, match="column right"):
        evaluate(path, task="gsm8k", reference_column="right")
