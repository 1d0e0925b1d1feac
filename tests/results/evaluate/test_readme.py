"""Every command of the README's section on evaluation runs as it is written, on a run of the tiny pair."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shlex
import sys

import pytest

from specdist.cli import generate
from specdist.config.arguments import parse_arguments
from specdist.results.evaluate.config import EvaluateConfig
from specdist.results.evaluate.run import run_evaluation
from tests.ranks import REPOSITORY
from tests.readme import blocks

BLOCKS = [block for block in blocks("bash") if "jobs/evaluate.py" in block]
COMMANDS = [line for block in BLOCKS[:-1] for line in block.splitlines()]
HARNESS_COMMANDS = BLOCKS[-1].splitlines()
FUNCTION = "def my_function(row):\n    return len(row['completion']) > 0\n"
PACKAGES = {"rouge": "rouge_score", "math": "math_verify"}


def test_the_section_has_commands_for_every_task() -> None:
    assert len(COMMANDS) == 9 and len(HARNESS_COMMANDS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_section_runs(command, generated, monkeypatch) -> None:
    for task, package in PACKAGES.items():
        if f"--task {task}" in command:
            pytest.importorskip(package, reason="the extra 'evaluate' is not installed")
    (generated.folder / "my_module.py").write_text(FUNCTION)
    monkeypatch.chdir(generated.folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = shlex.split(command.replace("TARGET", str(generated.pair.target)))
    assert arguments[:2] == ["python", "jobs/evaluate.py"]
    config = parse_arguments(EvaluateConfig, [*arguments[2:], "--overwrite"], positional="run")
    text, document = run_evaluation(config)
    assert document["num_rows"] == 12 and document["num_prompts"] == 6
    assert str(generated.mine.relative_to(generated.folder)) in text
    if config.task is not None:
        assert all(name in text and found["interval"] for name, found in document["metrics"].items())
    if config.against is not None:
        # Greedy: the first sample of every prompt equals that of the run without a draft.
        assert document["identity"]["num_rows"] == document["identity"]["num_identical"] == 6


def test_prompts_of_the_harness_are_generated_and_scored(generated, tasks, monkeypatch) -> None:
    """The three commands in their order, on a local task."""
    monkeypatch.chdir(tasks.parent)
    words = {"TASK": "toy_sums", "TASKS": str(tasks), "TARGET": str(generated.pair.target)}
    commands = [[words.get(word, word) for word in shlex.split(line)] for line in HARNESS_COMMANDS]
    assert [command[1] for command in commands] == [
        "jobs/evaluate.py", "jobs/generate.py", "jobs/evaluate.py"
    ]  # fmt: skip
    run_evaluation(parse_arguments(EvaluateConfig, commands[0][2:], positional="run"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert generate([*commands[1][2:], "--device", "cpu"]) == 0
    document = run_evaluation(parse_arguments(EvaluateConfig, commands[2][2:], positional="run"))[1]
    assert list(document["metrics"]) == ["toy_sums: exact_match, number"]
    assert document["metrics"]["toy_sums: exact_match, number"]["num_prompts"] == 3


def test_the_job_prints_one_document_and_reports_wrong_options(generated, monkeypatch, capsys) -> None:
    """Its last line on stdout is the document, and a wrong option ends it with a message."""
    job = str(REPOSITORY / "jobs" / "evaluate.py")
    options = ["--task", "exact_match", "--output", str(generated.folder / "scores")]
    monkeypatch.setattr(sys, "argv", [job, str(generated.mine), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(job, run_name="__main__")
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["metrics"]["exact_match"]["num_prompts"] == 6
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(job, run_name="__main__")
    assert ended.value.code == 2
    assert re.match(r"error: --output .* holds results.json already", capsys.readouterr().err)
