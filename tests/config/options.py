"""Configurations of the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from specdist.config.generate import GenerateConfig, parse_generate_config

NEEDED = {"prompts": "prompts.arrow", "output": "run", "target": "large"}
COMMAND_LINE = [f"--{name}={value}" for name, value in NEEDED.items()]


def config(**options: Any) -> GenerateConfig:
    """With what every run needs."""
    return GenerateConfig(**(NEEDED | options))


def from_file(folder: Path, values: Any, *arguments: str) -> GenerateConfig:
    """Read from a file, and from further words of the command line."""
    path = folder / "config.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return parse_generate_config(["--config", str(path), *arguments])
