"""The files shipped with the code: configurations parse and fit together, scripts parse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from specdist.config.generate import GenerateConfig, parse_generate_config

ROOT = Path(__file__).parents[3]
# Which accelerate configuration starts which job.
LAUNCHES = (("demo", "cpu"), ("llama-70b", "gpu8"), ("llama-70b", "gpu5"))
SCRIPTS = sorted(
    path.relative_to(ROOT) for folder in ("jobs", "slurm", "tests") for path in (ROOT / folder).rglob("*.sh")
)


def parse(name: str, *options: str) -> GenerateConfig:
    return parse_generate_config(["--config", str(ROOT / "jobs" / "configs" / f"{name}.yaml"), *options])


@pytest.mark.parametrize("name", dict(LAUNCHES))
def test_a_configuration_parses_and_every_option_has_its_effect(name: str) -> None:
    assert parse(name).warnings() == []
    assert parse(name, "--seed", "7").seed == 7


@pytest.mark.parametrize(("config_name", "launch_name"), LAUNCHES)
def test_accelerate_starts_the_ranks_that_a_configuration_needs(config_name: str, launch_name: str) -> None:
    launch = yaml.safe_load((ROOT / "jobs" / "accelerate" / f"{launch_name}.yaml").read_text())
    config = parse(config_name)
    config.check_world(launch["num_processes"])
    assert launch["use_cpu"] == (config.device == "cpu")
    assert launch["main_process_port"] == 0


@pytest.mark.parametrize("script", [*SCRIPTS, Path(".ci/run")], ids=str)
def test_a_script_parses_and_stops_at_its_first_error(script: Path) -> None:
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert "set -euo pipefail" in (ROOT / script).read_text()
