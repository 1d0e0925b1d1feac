"""The commands that ``jobs/plan.py`` prints can be typed: their files exist, and no replicas share a GPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdist.config.generate import GenerateConfig, parse_arguments, parse_generate_config
from specdist.planning import filling
from specdist.planning.advise import Planner, Work
from specdist.planning.documents import run_options
from specdist.planning.hardware import GPUS
from specdist.planning.job import open_model, run_plan
from specdist.planning.launch import launch_of
from specdist.planning.options import PlanConfig
from tests.models.families import tiny_model
from tests.ranks import REPOSITORY
from tests.readme import parsed

PAIR = [("--target", "70b"), ("--draft", "1b")]
CRAMPED = (
    "--target 70b --draft 1b --gpu h200 --prompt_tokens 500 --output_tokens 250 --max_num_seqs 4 "
    "--acceptance 0.8"
)


@dataclass(frozen=True)
class Command:
    """A printed command, taken apart and checked: ``gpus`` are None where it may use all."""

    gpus: tuple[int, ...] | None
    num_processes: int
    config: GenerateConfig


def planned(*arguments: str) -> tuple[str, dict[str, Any]]:
    return run_plan(parse_arguments(PlanConfig, list(arguments)), "python jobs/plan.py ...")


def checked(line: str) -> Command:
    """Every file that the line names exists, relative to the repository or absolute."""
    command = parsed(line)
    assert set(command.environment) <= {"CUDA_VISIBLE_DEVICES"}
    gpus = command.environment.get("CUDA_VISIBLE_DEVICES")
    assert (REPOSITORY / command.script).is_file()
    num_processes = 1
    if command.launcher != ("python",):
        assert command.launcher[:2] == ("accelerate", "launch")
        options = dict(zip(command.launcher[2::2], command.launcher[3::2], strict=True))
        assert (REPOSITORY / options.pop("--config_file")).is_file()
        num_processes = int(options.pop("--num_processes"))
        assert not options
    config = parse_generate_config(command.arguments)
    assert config.prompts == "PROMPTS" or Path(config.prompts).exists()
    config.check_world(num_processes)
    assert not config.warnings()
    return Command(None if gpus is None else tuple(map(int, gpus.split(","))), num_processes, config)


def check_gpus(commands: list[Command], gpus_per_node: int) -> None:
    """No replicas share a GPU, each has enough, and all of them exist on the node."""
    used = [gpu for command in commands for gpu in command.gpus or ()]
    assert len(used) == len(set(used)) and max(used, default=0) < gpus_per_node
    for command in commands:
        if command.gpus is None:
            assert len(commands) == 1 and command.num_processes <= gpus_per_node
        else:
            assert len(command.gpus) == command.num_processes


def printed_commands(text: str) -> list[str]:
    """The lines that a user would copy."""
    return [line for line in text.splitlines() if "jobs/generate.py --" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a plan")
    for name in ("target", "draft"):
        tiny_model("llama").config.save_pretrained(folder / name)
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    return folder


@pytest.mark.parametrize(
    ("arguments", "num_commands", "num_nodes"),
    [
        ("--target 70b --gpu h100-sxm --gpus_per_node 8", 2, 1),
        ("--target 70b --gpu h100-sxm --gpus_per_node 5", 1, 1),
        ("--target 70b --draft 1b --gpu h100-sxm --gpus_per_node 5 --acceptance 0.8 --num_prompts 8", 1, 1),
        ("--target 70b --draft 1b --gpu h100-sxm --gpus_per_node 8 --acceptance 0.8 --num_prompts 64", 2, 1),
        (f"{CRAMPED} --gpus_per_node 8", 1, 1),
        ("--target 70b --gpu h100-sxm --gpus_per_node 8 --num_gpus 24", 2, 3),
        ("--target 70b --gpu h100-sxm --gpus_per_node 8 --nodes 3 --num_prompts 1", 1, 1),
        ("--target 1b --gpu h100-sxm --gpus_per_node 4", 4, 1),
    ],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_launches_can_be_typed(
    tmp_path: Path, folder: Path, arguments: str, num_commands: int, num_nodes: int, has_file: bool
) -> None:
    paths = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(tmp_path / "run")]
    if has_file:
        paths += ["--output_config", str(tmp_path / "new" / "plan.yaml")]
    text, document = planned(*arguments.split(), *paths)
    lines = printed_commands(text)
    assert lines == document["launch"]["commands"] and len(lines) == num_commands
    assert document["launch"]["num_nodes"] == num_nodes
    assert "PLAN.yaml" not in text and "PROMPTS" not in text
    commands = [checked(line) for line in lines]
    check_gpus(commands, int(arguments.split("--gpus_per_node ")[1].split()[0]))
    if has_file:
        assert yaml.safe_load((tmp_path / "new" / "plan.yaml").read_text()) == document["options"]
    for command in commands:
        # One run: the replicas share it.
        assert command.config == commands[0].config
        for name, value in document["options"].items():
            assert getattr(command.config, name) == value, name
    num_replicas = num_commands * num_nodes
    if "h200" in arguments:
        # Where one GPU holds the target, but no draft beside it, one draft serves all the others.
        assert (commands[0].config.num_targets, commands[0].config.num_drafts) == (7, 1)
    assert ("share the prompts" in text) == (num_replicas > 1)
    assert (f"on each of {num_nodes} nodes" in text) == (num_nodes > 1)
    # Each replica finds some shards to do.
    num_shards = -(-document["recommended"]["num_prompts"] // commands[0].config.rows_per_shard)
    assert num_replicas == 1 or num_shards >= num_replicas


def test_a_plan_without_paths_says_where_they_go() -> None:
    text, _ = planned("--target", "70b", "--gpu", "h100-sxm", "--gpus_per_node", "8")
    assert "your paths in place of PROMPTS and OUTPUT" in text
    assert "Replace 70b" in text
    for line in printed_commands(text):
        assert "--prompts PROMPTS --output OUTPUT" in line and checked(line)


def test_a_plan_for_this_machine_stays_on_it(folder: Path) -> None:
    """With the CPU's launch file, and the models' own folders, which have a blank in their name."""
    text, _ = planned(
        "--target", str(folder / "target"), "--draft", str(folder / "draft"), "--acceptance", "0.9",
        "--device", "cpu", "--gpus_per_node", "3", "--prompt_tokens", "20", "--output_tokens", "10",
    )  # fmt: skip
    for line in printed_commands(text):
        command = checked(line)
        assert command.config.device == "cpu" and command.gpus is None
        assert Path(command.config.target).is_dir()
        assert command.num_processes == 1 or "jobs/accelerate/cpu.yaml" in shlex.split(line)


def test_prompts_longer_than_the_usual_one_are_not_refused(folder: Path) -> None:
    """--prompt_tokens is that of a usual prompt: what the models and the cache allow is taken too."""
    small = ["--target", str(folder / "target"), "--prompt_tokens", "20", "--output_tokens", "10"]
    text, document = planned(*small, "--gpu", "h100-sxm", "--dtype", "bfloat16")
    assert "max_seq_len" not in document["options"]
    assert "may have 256 tokens together" in text
    # A cache of few tokens: half of it.
    cramped = ["--target", "70b", "--gpu", "h100-sxm", "--gpus_per_node", "2"]
    _, document = planned(*cramped)
    room = document["recommended"]["most_rows"] * (512 + 256)
    assert document["options"]["max_seq_len"] == room // 2 > 768
    # Where there is room for one row and no more, it is that row's length.
    _, document = planned(*cramped, "--prompt_tokens", "40000", "--output_tokens", "2000")
    assert document["recommended"]["most_rows"] == 1
    assert document["options"]["max_seq_len"] == 42000


def test_targets_on_two_nodes_that_share_drafts_are_one_launch() -> None:
    """With equally many ranks on each node, and every target's on one of them."""
    target, draft = (open_model(option, name, "auto")[0] for option, name in PAIR)
    site = filling.Site(gpu=GPUS["h100-sxm"], gpus_per_node=8, num_nodes=4, max_num_seqs=8)
    work = Work(prompt_tokens=1000, output_tokens=500, num_prompts=10_000, acceptance=0.8, caught=0.5)
    found = Planner(target, draft, site, work).best_plans()
    plan = next(plan for plan in found if plan.shape.num_nodes == 2)
    shape = plan.shape
    assert (shape.num_targets, shape.num_drafts, shape.tp_size) == (7, 2, 2)
    assert shape.num_gpus == 16 and plan.num_replicas == 2
    paths = {"config_path": "plan.yaml", "prompts": None, "output": None}
    launch = launch_of(plan, site, {}, **paths, on_cpu=False)  # type: ignore[arg-type]
    assert launch.num_nodes == 4 and launch.nodes_per_replica == 2
    [command] = launch.commands
    assert "--num_machines 2 --machine_rank NODE --main_process_ip HOST" in command
    assert "--num_processes 16 " in command and "CUDA_VISIBLE_DEVICES" not in command
    assert "on 4 nodes, on every 2 of them together" in launch.lines()[0]


def test_three_targets_in_eight_bits_and_two_drafts_fill_a_node() -> None:
    """A 70B in 8 bits on two GPUs of 80 GB each: as the shipped configuration has it."""
    arguments = ["--target", "70b", "--draft", "1b", "--gpu", "h100-sxm", "--target_quantization", "float8"]
    config = parse_arguments(PlanConfig, [*arguments, "--num_gpus", "8", "--acceptance", "0.8"])
    target, _ = open_model("--target", "70b", "auto", quantization="float8")
    draft, _ = open_model("--draft", "1b", "auto")
    site = filling.Site(gpu=GPUS["h100-sxm"], gpus_per_node=8, num_nodes=1)
    work = Work(prompt_tokens=6000, output_tokens=1000, num_prompts=10_000, acceptance=0.8, caught=0.5)
    plans = Planner(target, draft, site, work).best_plans()
    [plan, *_] = [each for each in plans if each.shape.num_targets > 1]
    assert (plan.shape.num_targets, plan.tp_size, plan.shape.num_drafts) == (3, 2, 2)
    assert plan.settings.num_rows >= 32 and plan.num_replicas == 1
    options = run_options(config, plan, work, max_positions=8192)
    launch = launch_of(plan, site, options, config_path=None, prompts=None, output=None, on_cpu=False)
    [line] = launch.commands
    command = checked(line)
    shipped = parse_generate_config(["--config", str(REPOSITORY / "jobs/configs/llama-70b-groups.yaml")])
    assert command.num_processes == command.config.num_world_ranks == 8
    for name in ("num_targets", "num_drafts", "tp_size", "target_quantization"):
        assert getattr(command.config, name) == getattr(shipped, name) == options[name]
