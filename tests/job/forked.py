"""What a process that is forked to be killed runs. Importing it imports all that the job needs."""

from __future__ import annotations

import os
import sys

from specdist.job.generate import main as generate
from tests.job.launching import Main


def run_quietly(arguments: list[str], main: Main = generate) -> None:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        sys.stdout = sys.stderr = nowhere
        sys.exit(main(arguments))


def run_rank_quietly(environment: dict[str, str], arguments: list[str], main: Main = generate) -> None:
    """One rank among several, as the job's script runs it."""
    os.environ.update(environment)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        sys.stdout = sys.stderr = nowhere
        os._exit(main(arguments))
