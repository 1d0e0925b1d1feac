"""Compare specdist with transformers on the same models, prompts and lengths; or its length policies.

    python jobs/benchmark.py --synthetic 20m --acceptance 0.8 --output runs/benchmark.json
    python jobs/benchmark.py --synthetic 20m --acceptance 0.8 --profile runs/profile
    python jobs/benchmark.py --target T --draft D --prompts FILE --policies all --output runs/policies.json
    python jobs/benchmark.py --update_readme jobs/benchmarks/README.md --results runs/benchmark.json
    python jobs/benchmark.py --update_readme README.md --brief --results runs/benchmark.json

The last line on stdout is a JSON document.
"""

import json
import logging
import shlex
import sys
from pathlib import Path

from specdist.benchmark import (
    BenchmarkConfig,
    console_report,
    profile_report,
    run_benchmark,
    run_profile,
    summary,
    update_readme,
)
from specdist.config.arguments import parse_arguments
from specdist.utils.errors import UserError, exit_with


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("specdist").setLevel(logging.INFO)
    try:
        config = parse_arguments(BenchmarkConfig)
        if config.update_readme is not None:
            results = [Path(result) for result in config.results or []]
            update_readme(Path(config.update_readme), results, is_brief=config.brief)
            print(json.dumps({"updated": config.update_readme}))
            return
        command = shlex.join(["python", "jobs/benchmark.py", *sys.argv[1:]])
        if config.profile is not None:
            profile = run_profile(config, command)
            print(profile_report(profile), f"\ntraces and numbers: {config.profile}\n", sep="\n")
            print(json.dumps({"profile": config.profile, "traces": [run.trace for run in profile.runs]}))
            return
        result = run_benchmark(config, command)
    except UserError as error:
        exit_with(error)
    print(console_report(result), f"\nall of it: {config.output}\n", sep="\n")
    print(json.dumps(summary(result)))


if __name__ == "__main__":
    main()
