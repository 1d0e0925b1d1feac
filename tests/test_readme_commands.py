"""Every command and every piece of Python in the README is run, on models that are tiny.

A folder has all the names that the README uses: ``TARGET``, ``data/prompts.parquet``, a finished
``runs/mine``. A command runs there as it is typed, in this process, with options after it that make it
short. What cannot be run here is named below, with the test that runs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import yaml

from specdist.cli import collect, distill, generate, show
from specdist.config.generate import parse_generate_config
from tests.job.launching import run_here
from tests.job.pair import Pair
from tests.ranks import REPOSITORY
from tests.readme import Command, blocks, commands, workspace_of

# These end their process, so their functions are called.
MAINS = {"jobs/generate.py": generate, "jobs/collect.py": collect, "jobs/distill.py": distill}
ON_CPU = ["--device", "cpu"]
SHORT = {
    "jobs/collect.py": [*ON_CPU, "--tp_size", "1", "--limit", "8", "--max_new_tokens", "6"],
    "jobs/distill.py": [*ON_CPU, "--epochs", "1", "--prompt_rows", "2"],
    "jobs/train_head.py": [*ON_CPU, "--epochs", "1", "--depth", "0"],
}
# What is in a command that is not run here, and why; other tests run it or its parts.
ELSEWHERE = {
    "jobs/demo.sh": "installs, and trains for minutes (tests/lab/demo)",
    "jobs/benchmark.py": "starts a process for every engine (tests/lab/test_benchmark.py)",
    "jobs/offline.sh": "downloads gigabytes (tests/test_offline.py)",
    "tests/run.sh": "runs this test",
    "slurm/run.sh": "needs a cluster, of which the tests start a small one (tests/slurm)",
    "--emulate": "takes minutes (tests/lab/emulation)",
    "s3://": "needs a bucket, of which the tests start a server (tests/job/test_buckets.py)",
    "jobs/evaluate.py": "wants prompts with answers (tests/results/evaluate/test_readme.py)",
}
COMMANDS = commands()
RUN_HERE = [command for command in COMMANDS if not any(part in command.line for part in ELSEWHERE)]


@pytest.fixture(scope="module")
def workspace(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run of four shards, ``runs/finished`` and ``runs/mine``."""
    path = workspace_of(tmp_path_factory.mktemp("readme"))
    rows = pa.ipc.open_file(pair.prompts).read_all()
    rows = rows.append_column("question", rows["prompt"]).append_column("answer", rows["reference"])
    for name in ("prompts", "train"):
        pa.parquet.write_table(rows, path / "data" / f"{name}.parquet")
    shutil.copy(pair.prompts, path / "prompts.arrow")
    (path / "judge.jinja").write_text(blocks("jinja")[0])
    (path / "verdict.json").write_text(next(block for block in blocks("json") if '"score"' in block))
    (path / "check.py").write_text(next(block for block in blocks("py") if "import rollout" in block))
    (path / "jobs" / "rollouts").symlink_to(REPOSITORY / "jobs" / "rollouts")
    # Those that lm-evaluation-harness would leave beside its prompts.
    (path / "prompts.yaml").write_text(yaml.safe_dump({"device": "cpu", "max_new_tokens": 4, "limit": 2}))
    (path / "TARGET").symlink_to(pair.target)
    (path / "DRAFT").symlink_to(pair.draft)
    (path / "runs" / "demo").mkdir()
    (path / "runs" / "demo" / "pair").symlink_to(pair.folder)
    options: dict[str, Any] = {
        "prompts": str(path / "data" / "prompts.parquet"),
        "target": str(pair.target),
        "draft": str(pair.draft),
        "device": "cpu",
        "temperature": 0.7,
        "max_new_tokens": 8,
        "limit": 8,
        "rows_per_shard": 2,
    }
    for name in ("llama-70b", "qwen3-8b"):
        (path / "jobs" / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(options))
    assert run_here(**options, output=path / "runs" / "finished").code == 0
    shutil.copytree(path / "runs" / "finished", path / "runs" / "mine")
    return path


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace)
    return workspace


def output_of(command: Command) -> str | None:
    """What it makes."""
    words = command.arguments
    made = (words[place + 1] for place, word in enumerate(words) if word in ("--output", "--new_draft"))
    return next(made, None)


def provide(here: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command reads: made by that command of the README which makes it, or else a finished run. What
    it makes itself is not there.
    """
    made = output_of(command)
    if made is not None and (here / made).is_dir():
        shutil.rmtree(here / made)
    elif made is not None:
        (here / made).unlink(missing_ok=True)
    for word in command.arguments:
        if not word.startswith("runs/") or word == made or (here / word).exists():
            continue
        makers = [other for other in COMMANDS if f"{word}/".startswith(f"{output_of(other)}/")]
        if makers and makers[0].script != "jobs/generate.py":
            run(makers[0], here, monkeypatch)
        else:
            shutil.copytree(here / "runs" / "finished", here / word)


def run(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is typed, with options after it that make it short."""
    script = REPOSITORY / command.script
    assert script.is_file(), f"{command.line}: no such script; name it in ELSEWHERE?"
    assert command.launcher == ("python",) or launches(command)
    provide(here, command, monkeypatch)
    arguments = [*command.arguments, *SHORT.get(command.script, [])]
    code: Any = 0
    try:
        if command.script in MAINS:
            code = MAINS[command.script](arguments)
        else:
            monkeypatch.setattr(sys, "argv", [command.script, *arguments])
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code
    assert code in (0, None), f"{command.line}: {code}"


@pytest.mark.parametrize("command", RUN_HERE, ids=lambda command: command.line[:70])
def test_a_command_runs(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, here, monkeypatch)
    assert capsys.readouterr().out


def launches(command: Command) -> bool:
    """Whether ``accelerate launch`` understands what stands before the script, and finds its file."""
    from accelerate.commands.launch import launch_command_parser

    if command.launcher[:2] != ("accelerate", "launch"):
        return False
    arguments = [*command.launcher[2:], command.script, *command.arguments]
    parsed = launch_command_parser().parse_args(arguments)
    return parsed.training_script == command.script and (REPOSITORY / parsed.config_file).is_file()


def test_what_is_run_elsewhere_is_there() -> None:
    """Nothing is excepted that the README does not have; and the tests that are named exist."""
    for part, why in ELSEWHERE.items():
        assert any(part in command.line for command in COMMANDS), part
        assert all((REPOSITORY / path).exists() for path in re.findall(r"tests/[\w/]+(?:\.py)?", why)), part


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.script == "slurm/run.sh"], ids=lambda c: c.line
)
def test_a_job_of_replicas_is_what_the_script_takes(command: Command) -> None:
    """Settings that it reads, a configuration, and options of the main job after it."""
    script = (REPOSITORY / command.script).read_text()
    assert all(f'{name}="${{{name}:-' in script for name in command.environment)
    assert command.launcher[0] == "sbatch" and all(option.startswith("--") for option in command.launcher[1:])
    config, *options = command.arguments
    shipped = REPOSITORY / ("jobs/configs/llama-70b.yaml" if config == "CONFIG" else config)
    parse_generate_config(["--config", str(shipped), *options])


def test_the_demos_output_is_what_the_program_prints(here: Path) -> None:
    """But for numbers and texts. Fault: a line of ``show`` has changed, and the first page has not."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0].strip().strip("`\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert show(["runs/finished", "--rows", "1"]) == 0
    assert skeleton(shown) == skeleton(printed.getvalue())


def skeleton(text: str) -> list[str]:
    """The first paragraph's entries, and how a row's begin, without numbers and line ends."""
    summary, rows = re.sub(r"[\d,.]*\d", "N", text).split("\n\n", 1)
    words = [line.split()[0] for line in rows.splitlines() if line[:1].strip() and line[0] != "["]
    return [*(" ".join(entry.split()) for entry in re.split(r"\n(?=\w)", summary)), *words]


def imports(block: str) -> list[str]:
    return sorted(set(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)))


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: ", ".join(imports(block)))
def test_python_of_the_readme_runs(block: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in imports(block) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    for command in RUN_HERE:
        made = output_of(command)
        if f'"{made}"' in block and not (here / str(made)).exists():
            run(command, here, monkeypatch)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_a_command_that_no_test_runs_is_noticed() -> None:
    """The blocks are found at all, and few commands are excepted."""
    assert len(COMMANDS) > 10 and len(RUN_HERE) > 8 and len(blocks("python")) >= 4
    assert os.environ["HF_HUB_OFFLINE"] == "1", "no command of the README may need a network here"
