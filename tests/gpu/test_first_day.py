"""The first commands on a GPU node: their plan, and some of them on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import first_day
from tests.gpu.first_steps import Step, plan
from tests.job.pair import Pair
from tests.ranks import REPOSITORY

TIMEOUT_S = 250


def day(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.first_day", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)


def document(ended: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_plan_is_shown_with_the_list_of_what_only_a_gpu_can_show(tmp_path: Path) -> None:
    ended = day("--list", "--output", str(tmp_path / "day"))
    assert ended.returncode == 0, ended.stderr
    assert document(ended)["steps"] == [step.name for step in plan(tmp_path, None, device="cuda")]
    for words in ("Races between streams", "NCCL's own blocking", "Memory:", "Kernels' accuracy", "Time:"):
        assert words in ended.stdout
    assert not (tmp_path / "day").exists()


def test_the_steps_that_a_cpu_can_do_pass_and_their_results_are_saved(pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "day"
    given = ["--pretend", "--pair", str(pair.folder), "--output", str(output)]
    ended = day(*given, "--only", "cpu", "main", "long-pair", "long-alone", "long")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert document(ended) == {
        "output": str(output), "num_gpus": 0, "passed": 4, "failed": 0, "skipped": 1, "failures": [],
    }  # fmt: skip
    kept = json.loads((output / "results.json").read_text())["results"]
    assert [result["outcome"] for result in kept] == ["passed", "skipped"] + ["passed"] * 3
    for name in ("long-alone", "long"):
        assert "16 of 16 completions" in (output / "logs" / f"{name}.log").read_text()
    # A run that differs is a failure.
    (output / "long" / "shards" / "shard-00000.arrow").unlink()
    comparison = [
        sys.executable,
        "-m",
        "tests.gpu.first_checks",
        "equal",
        str(output / "long-alone"),
        str(output / "long"),
    ]
    assert subprocess.run([*comparison, "--", "true"], cwd=REPOSITORY, capture_output=True).returncode


def test_a_step_that_fails_or_takes_too_long_does_not_end_the_day(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    common = {"title": "", "tells": "", "num_gpus": 0}
    slow = Step(name="slow", command=["sleep", "60"], limit_s=1, **common)
    wrong = Step(name="wrong", command=["sh", "-c", "echo broken; exit 7"], **common)
    large = Step(name="large", command=["true"], **(common | {"num_gpus": 3}))
    results = [first_day.run(step, tmp_path, 1, pretends=False) for step in (slow, wrong, large)]
    assert [result.outcome for result in results] == ["FAILED", "FAILED", "skipped"]
    assert results[0].reason.startswith("not over after 1 s") and results[0].seconds < 30
    assert results[1].reason == "exit code 7: broken"
    assert results[2].reason == "it needs 3 GPUs, and this node has 1"


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_long_prompts_are_run_on_as_many_gpus_as_the_main_job_takes(
    tmp_path: Path, num_gpus: int, num_ranks: int
) -> None:
    steps = {step.name: step for step in plan(tmp_path, None, device="cuda", num_gpus=num_gpus)}
    assert steps["long"].num_gpus == num_ranks
    assert ("--tp_size" in steps["long"].command) == (num_ranks > 1)
    assert ("--draft" in steps["long"].command) == (num_ranks != 2)
    for name in ("long-alone", "long"):
        command = steps[name].command
        assert command[command.index("--dtype") + 1] == "bfloat16"
        assert command[command.index("--share") + 1] == "1.0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_run_and_the_message_says_so(tmp_path: Path) -> None:
    ended = day("--output", str(tmp_path / "day"))
    assert ended.returncode == first_day.NO_GPU
    assert "This machine has no GPU: nothing was run." in ended.stdout
    assert not (tmp_path / "day").exists()
