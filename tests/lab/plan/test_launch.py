"""The commands that ``jobs/plan.py`` prints can be typed: their files exist, and no replicas share a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from specdist.config.generate import GenerateConfig, parse_generate_config
from specdist.data.run.manifest import ShardPlan
from tests.lab.plan.test_job import planned
from tests.models.families import tiny_model
from tests.ranks import REPOSITORY
from tests.readme import parsed

PAIR = [("--target", "70b"), ("--draft", "1b")]


@dataclass(frozen=True)
class Command:
    """A printed command, taken apart and checked: ``gpus`` are None where it may use all."""

    gpus: tuple[int, ...] | None
    num_processes: int
    config: GenerateConfig


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
    assert (config.prompts, config.output) == (["PROMPTS"], "OUTPUT")
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
    return folder


@pytest.mark.parametrize(
    ("arguments", "num_commands", "num_nodes", "has_file"),
    [
        ("--target 70b --gpu h100-sxm --gpus_per_node 5", 1, 1, False),
        ("--target 70b --draft 1b --gpu h100-sxm --gpus_per_node 5 --acceptance 0.8 --num_prompts 8",
         1, 1, True),
        ("--target 70b --draft 1b --gpu h100-sxm --gpus_per_node 8 --acceptance 0.8 --num_prompts 64",
         2, 1, False),
        ("--target 70b --gpu h100-sxm --gpus_per_node 8 --nodes 3", 2, 3, True),
        ("--target 70b --gpu h100-sxm --gpus_per_node 8 --nodes 3 --num_prompts 1", 1, 1, False),
        ("--target 1b --draft ngram --acceptance 0.5 --gpu h100-sxm --gpus_per_node 4", 4, 1, False),
    ],
)  # fmt: skip
def test_launches_can_be_typed(
    tmp_path: Path, arguments: str, num_commands: int, num_nodes: int, has_file: bool
) -> None:
    path = tmp_path / "new" / "plan.yaml"
    text, document = planned(*arguments.split(), *(["--output_config", str(path)] if has_file else []))
    lines = printed_commands(text)
    assert lines == document["launch"]["commands"] and len(lines) == num_commands
    assert document["launch"]["num_nodes"] == num_nodes
    commands = [checked(line) for line in lines]
    check_gpus(commands, int(arguments.split("--gpus_per_node ")[1].split()[0]))
    if has_file:
        assert yaml.safe_load(path.read_text()) == document["options"]
    for command in commands:
        # One run: the replicas share it.
        assert command.config == commands[0].config
        for name, value in document["options"].items():
            assert getattr(command.config, name) == value, name
    num_replicas = num_commands * num_nodes
    assert "your paths in place of PROMPTS and OUTPUT" in text and "Replace " in text
    assert ("share the prompts" in text) == (num_replicas > 1)
    assert (f"on each of {num_nodes} nodes" in text) == (num_nodes > 1)
    # Each replica finds some shards to do.
    num_shards = ShardPlan.of(
        document["recommended"]["num_prompts"], commands[0].config.rows_per_shard
    ).num_shards
    assert num_replicas == 1 or num_shards >= num_replicas


def test_prompts_longer_than_the_usual_one_are_not_refused(folder: Path) -> None:
    """--prompt_tokens is that of a usual prompt: what the models and the cache allow is taken too."""
    small = ["--target", str(folder / "target"), "--prompt_tokens", "20", "--output_tokens", "10"]
    text, document = planned(*small, "--gpu", "h100-sxm", "--dtype", "bfloat16")
    assert "max_seq_len" not in document["options"]
    assert "need 30 tokens together, and may have 256 (--max_seq_len)" in text
    # A cache of few tokens: half of it.
    cramped = ["--target", "70b", "--gpu", "h100-sxm", "--gpus_per_node", "2"]
    _, document = planned(*cramped)
    room = document["recommended"]["most_rows"] * (512 + 256)
    assert document["options"]["max_seq_len"] == room // 2 > 768
    # Where there is room for one row and no more, it is that row's length.
    _, document = planned(*cramped, "--prompt_tokens", "40000", "--output_tokens", "2000")
    assert document["recommended"]["most_rows"] == 1
    assert document["options"]["max_seq_len"] == 42000
