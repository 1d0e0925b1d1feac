"""Configurations of the main job."""

from __future__ import annotations

from typing import Any

from specdist.config.generate import GenerateConfig

NEEDED = {"prompts": "prompts.arrow", "output": "run", "target": "large"}


def config(**options: Any) -> GenerateConfig:
    """With what every run needs."""
    return GenerateConfig(**(NEEDED | options))
