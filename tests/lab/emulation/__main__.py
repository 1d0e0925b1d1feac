"""Emulate rounds of large models on this machine: ``python -m tests.lab.emulation --emulate GPU ...``."""

from __future__ import annotations

import sys
from typing import Any

from specdist.cli import Command
from tests.lab.emulation.config import EmulationConfig


def emulate(config: EmulationConfig, command: str) -> tuple[str, dict[str, Any]]:
    """The text and the document to print."""
    from tests.lab.emulation.run import run_emulation

    result = run_emulation(config, command)
    return result.report(), result.to_json()


main = Command(
    "emulation", "emulate rounds of large models",
    "tests.lab.emulation.config:EmulationConfig", f"{__name__}:emulate",
    program="python -m tests.lab.emulation", logs=True,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
