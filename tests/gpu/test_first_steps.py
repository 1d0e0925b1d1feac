"""The first commands on a GPU node: their plan, their order, and their comparisons of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.config.arguments import parse_arguments
from specdist.config.generate import GenerateConfig
from tests.gpu import first_day
from tests.gpu.first_checks import compare, compare_draws, compare_rounded, share_of_same
from tests.gpu.first_steps import Step, plan
from tests.job.pair import write_arrow


def completed(folder: Path, rows: list[list[int]], **columns: Any) -> Path:
    (folder / "shards").mkdir(parents=True)
    write_arrow(folder / "shards/shard-00000.arrow", {"completion_ids": rows, **columns})
    return folder


def test_a_greedy_row_may_leave_another_only_where_two_tokens_are_equally_likely(tmp_path: Path) -> None:
    wanted = completed(
        tmp_path / "wanted", [[5, 6, 7]], top_logprobs=[[[-0.1, -3], [-0.7, -0.7002], [-0.1, -3]]]
    )
    assert compare(completed(tmp_path / "tie", [[5, 9, 9]]), wanted) == 0
    assert compare(completed(tmp_path / "wrong", [[5, 6, 9]]), wanted) == 1
    assert compare(completed(tmp_path / "short", [[5, 6]]), wanted) == 1
    unknown = completed(tmp_path / "unknown", [[5, 6, 7]])
    assert compare(tmp_path / "tie", unknown) == 1 and compare(wanted, unknown) == 0


def test_rounding_may_change_rows_as_often_as_on_a_cpu_and_a_wrong_kernel_more_often(tmp_path: Path) -> None:
    """Half of the rows may differ; of what comes before the first difference half may be lost."""
    text = list(range(100, 132))

    def leaves(name: str, *places: int) -> Path:
        """The runs' rows leave the text at these tokens."""
        return completed(tmp_path / name, [[*text[:at], *([0] * (len(text) - at))] for at in places])

    wanted, cpu = leaves("wanted", 32, 32, 32, 32), leaves("cpu", 32, 32, 20, 12)
    assert share_of_same(cpu, wanted) == 0.75
    assert compare_rounded(leaves("right", 3, 32, 29, 8), wanted, cpu) == 0
    assert compare_rounded(leaves("wrong", 2, 0, 32, 1), wanted, cpu) == 1
    assert compare_draws(leaves("a moved draw", 20, 32, 32, 32), wanted) == 0
    assert compare_draws(leaves("other draws", 20, 32, 31, 30), wanted) == 1


def test_a_step_that_fails_or_takes_too_long_does_not_end_the_day(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    common = {"title": "", "tells": "", "num_gpus": 0}
    slow = Step(name="slow", command=["sleep", "60"], limit_s=1, **common)
    wrong = Step(name="wrong", command=["sh", "-c", "echo broken; exit 7"], **common)
    large = Step(name="large", command=["true"], **(common | {"num_gpus": 3}))
    results = [first_day.run(step, tmp_path, 1, is_fake=False) for step in (slow, wrong, large)]
    assert [result.outcome for result in results] == ["FAILED", "FAILED", "skipped"]
    assert results[0].reason.startswith("not over after 1 s") and results[0].seconds < 30
    assert results[1].reason == "exit code 7: broken"
    assert results[2].reason == "it needs 3 GPUs, and this node has 1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_plan_is_shown_and_without_a_gpu_nothing_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = ["--output", str(tmp_path / "day")]
    assert first_day.main(["--list", *day]) == 0
    told = capsys.readouterr().out
    steps = [step.name for step in plan(tmp_path, device="cuda")]
    assert json.loads(told.splitlines()[-1])["steps"] == steps
    assert "Races between streams" in told and "Time:" in told
    assert first_day.main(day) == first_day.NO_GPU
    assert "This machine has no GPU: nothing was run." in capsys.readouterr().out
    assert not (tmp_path / "day").exists()


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(1, 1), (2, 2), (8, 3)])
def test_each_step_follows_what_it_reads_and_every_job_is_one_that_the_options_permit(
    tmp_path: Path, num_gpus: int, num_ranks: int
) -> None:
    """Long prompts are run on as many GPUs as the main job takes."""
    found = plan(tmp_path, device="cuda", num_gpus=num_gpus)
    for number, step in enumerate(found):
        assert step.limit_s <= 540
        before = {other.name for other in found[:number]}
        paths = [Path(word) for word in step.command if word.startswith(f"{tmp_path}/")]
        read = {path.relative_to(tmp_path).parts[0] for path in paths} & before
        # It looks in the folder of the day, and does without all others.
        assert read == set(step.needs) - ({"costs"} if step.name == "calibration" else set())
        assert set(step.needs) <= before
    steps = {step.name: step for step in found}
    names = list(steps)
    assert names.index("shapes") < names.index("calibration") < names.index("one") < names.index("main")
    assert ("8" in steps["all-reduce"].command) == (num_gpus == 8)
    assert steps["long"].num_gpus == num_ranks
    assert ("--tp_size" in steps["long"].command) == (num_ranks > 1)
    assert ("--draft" in steps["long"].command) == (num_ranks != 2)
    configs = {
        name: parse_arguments(GenerateConfig, step.command[step.command.index("--prompts") :])
        for name, step in steps.items()
        if "--prompts" in step.command and name != "vllm"
    }
    assert {"sampled", "sharded-nccl", "main", "kill", "memory", "asynchronous"} < configs.keys()
    for name, config in configs.items():
        assert config.output == str(tmp_path / name)
        # What a CPU has done is compared with the same on the device.
        if f"cpu-{name}" in configs:
            assert vars(configs[f"cpu-{name}"]) | {"device": "cuda", "output": config.output} == vars(config)
    assert (configs["sampled"].top_p, configs["one"].temperature) == (0.9, 0)


def test_a_day_goes_on_where_it_ended_and_a_step_brings_along_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are shell commands; each needs the one before it, and the second fails at first."""
    steps: list[Step] = []
    for name in ("one", "two", "three"):
        script = f"mkdir -p {tmp_path}/{name}; echo {name} >>{tmp_path}/ran; test {name} != two || "
        script += f"test -e {tmp_path}/mended"
        needs = tuple(step.name for step in steps[-1:])
        steps.append(
            Step(name=name, title="", tells="", needs=needs, num_gpus=0, command=["sh", "-c", script])
        )
    monkeypatch.setattr(first_day, "plan", lambda *_, **__: steps)
    monkeypatch.setattr(first_day, "count_gpus", lambda: 1)

    def call(*arguments: str) -> list[str]:
        """The steps that a call has run."""
        (tmp_path / "ran").write_text("")
        first_day.main([*arguments, "--output", str(tmp_path)])
        return (tmp_path / "ran").read_text().split()

    def kept() -> dict[str, str]:
        results = json.loads((tmp_path / "results.json").read_text())["results"]
        return {result["name"]: result["outcome"] for result in results}

    assert call("--only", "one") == ["one"]
    assert call() == ["two", "three"] and kept() == {"one": "passed", "two": "FAILED", "three": "passed"}
    (tmp_path / "mended").touch()
    assert call() == ["two"] and call() == [] and set(kept().values()) == {"passed"}
    assert call("--only", "three") == ["three"]
    (tmp_path / "one").rmdir()
    assert call("--only", "two") == ["one", "two"]
