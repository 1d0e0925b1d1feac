"""Emulate rounds of large models on this machine: ``python -m tests.lab.emulation --emulate GPU ...``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from tests.lab.emulation.config import EmulationConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log_to_stderr()
    config = parse_arguments(EmulationConfig, arguments)

    from tests.lab.emulation.run import run_emulation

    result = run_emulation(config, shlex.join(["python", "-m", "tests.lab.emulation", *arguments]))
    print(result.report(), "", sep="\n")
    print(json.dumps(result.summary()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
