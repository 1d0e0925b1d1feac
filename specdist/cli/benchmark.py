"""Compare specdist with transformers, or its length policies, or profile it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.lab.benchmark.config import BenchmarkConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log_to_stderr()
    command = shlex.join(["python", "jobs/benchmark.py", *arguments])
    config = parse_arguments(BenchmarkConfig, arguments)

    from specdist.lab.benchmark.report import console_report, summary, update_readme
    from specdist.lab.benchmark.run import run_benchmark
    from specdist.lab.benchmark.sides.profile import profile_report, run_profile

    if config.update_readme is not None:
        results = [Path(result) for result in config.results or []]
        update_readme(Path(config.update_readme), results, is_brief=config.brief)
        print(json.dumps({"updated": config.update_readme}))
        return 0
    if config.profile is not None:
        profile = run_profile(config, command)
        print(profile_report(profile), f"\ntraces and numbers: {config.profile}\n", sep="\n")
        print(json.dumps({"profile": config.profile, "traces": [run.trace for run in profile.runs]}))
        return 0
    result = run_benchmark(config, command)
    print(console_report(result), f"\nall of it: {config.output}\n", sep="\n")
    print(json.dumps(summary(result)))
    return 0
