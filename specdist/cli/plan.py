"""Estimate memory and speed of a run before any GPU is used."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.lab.plan.options import PlanConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log_to_stderr()
    config = parse_arguments(PlanConfig, arguments)

    from specdist.lab.plan.job import run_plan

    text, document = run_plan(config, shlex.join(["python", "jobs/plan.py", *arguments]))
    print(text, json.dumps(document), sep="\n\n")
    return 0
