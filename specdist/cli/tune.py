"""Find the draft-length policy for a pair of models on this hardware."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdist.cli.ending import heavy_imports, log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.lab.tune.config import TuneConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    log_to_stderr()
    config = parse_arguments(TuneConfig, arguments)

    with heavy_imports():
        from specdist.lab.tune.report import console_report, summary, write_report
        from specdist.lab.tune.run import run_tuning

    result = run_tuning(config)
    write_report(result)
    print(console_report(result), end="\n\n")
    print(json.dumps(summary(result)))
    return 0
