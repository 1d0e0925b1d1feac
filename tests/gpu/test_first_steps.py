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
from tests.gpu.first_jobs import Step
from tests.gpu.first_steps import plan
from tests.job.pair import write_arrow


def test_the_plan_is_shown_with_the_list_of_what_only_a_gpu_can_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_day.main(["--list", "1", "--output", str(tmp_path / "day")]) == 0
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1])["steps"] == [
        step.name for step in plan(tmp_path, None, device="cuda")
    ]
    for words in ("Races between streams", "NCCL's own blocking", "Memory:", "Kernels' accuracy", "Time:"):
        assert words in told
    assert not (tmp_path / "day").exists()


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
    assert compare(completed(tmp_path / "long", [[5, 6, 7, 8]]), wanted) == 1
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
    assert compare(cpu, wanted) == 1 and compare(wanted, wanted) == 0
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
        assert "equal" in command


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_run_and_the_message_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_day.main(["--output", str(tmp_path / "day")]) == first_day.NO_GPU
    assert "This machine has no GPU: nothing was run." in capsys.readouterr().out
    assert not (tmp_path / "day").exists()


def test_no_step_takes_longer_than_a_command_may_and_each_follows_what_it_reads(tmp_path: Path) -> None:
    for num_gpus in (1, 8):
        steps = plan(tmp_path, None, device="cuda", num_gpus=num_gpus)
        for number, step in enumerate(steps):
            assert step.limit_s <= 540
            before = {other.name for other in steps[:number]}
            assert set(step.needs) <= before
            paths = [Path(word) for word in step.command if word.startswith(f"{tmp_path}/")]
            read = {path.relative_to(tmp_path).parts[0] for path in paths} & before
            # It looks in the folder of the day, and does without all others.
            assert read == set(step.needs) - ({"costs"} if step.name == "calibration" else set())


def test_every_job_is_one_that_the_options_permit(tmp_path: Path) -> None:
    steps = plan(tmp_path, None, device="cuda", num_gpus=8, large=("target", "draft"))
    jobs = {step.name: step.command for step in steps if "--prompts" in step.command}
    configs = {
        name: parse_arguments(GenerateConfig, words[words.index("--prompts") :])
        for name, words in jobs.items()
    }
    assert {
        "cpu",
        "sampled",
        "sharded-nccl",
        "main",
        "kill",
        "memory",
        "asynchronous",
        "large",
    } < configs.keys()
    for name, config in configs.items():
        assert config.output == str(tmp_path / name)
        # What a CPU has done is compared with the same on the device.
        if f"cpu-{name}" in configs:
            assert vars(configs[f"cpu-{name}"]) | {"device": "cuda", "output": config.output} == vars(config)
    assert (configs["sampled"].temperature, configs["sampled"].top_p, configs["one"].temperature) == (
        0.8,
        0.9,
        0,
    )


def test_the_order_is_that_of_what_is_learned(tmp_path: Path) -> None:
    names = [step.name for step in plan(tmp_path, None, device="cuda", num_gpus=8)]

    def in_order(*wanted: str) -> bool:
        return sorted(wanted, key=names.index) == list(wanted)

    assert in_order("versions", "shapes", "costs", "graphs", "all-reduce", "calibration", "pair")
    assert in_order("one", "sharded-nccl", "main", "long", "kill", "memory", "kernels", "large", "leftovers")
    steps = {step.name: step for step in plan(tmp_path, None, device="cuda", num_gpus=8, large=("t", "d"))}
    assert "8" in steps["all-reduce"].command and {"t", "d"} < set(steps["large"].command)
    left_out = next(step for step in plan(tmp_path, None, device="cuda", num_gpus=8) if step.name == "large")
    assert first_day.run(left_out, tmp_path, 8, is_fake=False).reason.startswith(
        "it needs --large TARGET DRAFT"
    )


class Day:
    """The program with steps that are shell commands; a step needs the one before it."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.output = output
        steps: list[Step] = []
        for name, time in seconds.items():
            script = f"mkdir -p {output}/{name}; echo {name} >>{output}/ran; sleep {time}"
            needs = tuple(step.name for step in steps[-1:])
            steps.append(
                Step(name=name, title="", tells="", needs=needs, num_gpus=0, command=["sh", "-c", script])
            )
        monkeypatch.setattr(first_day, "plan", lambda *_, **__: steps)
        monkeypatch.setattr(first_day, "count_gpus", lambda: 1)
        monkeypatch.setattr(first_day, "LEAST_S", 0.2)

    def call(self, *arguments: str) -> list[str]:
        """The steps that a call has run."""
        (self.output / "ran").unlink(missing_ok=True)
        first_day.main([*arguments, "--output", str(self.output)])
        ran = self.output / "ran"
        return ran.read_text().split() if ran.is_file() else []

    @property
    def kept(self) -> dict[str, str]:
        results = json.loads((self.output / "results.json").read_text())["results"]
        return {result["name"]: result["outcome"] for result in results}


def test_a_day_goes_on_where_time_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    day = Day(tmp_path, monkeypatch, one=0, two=2, three=0)
    assert day.call("--minutes", "0.025") == ["one", "two"]
    assert day.kept == {"one": "passed"}, "a step that --minutes cut short has not failed"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == ["two", "three"]
    assert day.call("--minutes", "0.2") == ["two", "three"]
    assert day.kept == {"one": "passed", "two": "passed", "three": "passed"}
    assert day.call("--minutes", "0.2") == []
    # Alone it is the step that takes too long.
    day = Day(tmp_path / "short", monkeypatch, two=9)
    day.call("--minutes", "0.01")
    assert day.kept == {"two": "FAILED"}


def test_a_step_brings_along_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = Day(tmp_path, monkeypatch, one=0, two=0, three=0)
    assert day.call("--only", "two") == ["one", "two"]
    assert day.call("--only", "three") == ["three"]
    assert day.kept == {"one": "passed", "two": "passed", "three": "passed"}, "results are kept by name"
    (tmp_path / "one").rmdir()
    assert day.call("--only", "three") == ["three"]
    assert day.call("--only", "two") == ["one", "two"]
