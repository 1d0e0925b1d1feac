"""Score a run's completions, and compare them with another run's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.results.evaluate.config import EvaluateConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    log_to_stderr()
    config = parse_arguments(EvaluateConfig, arguments, positional="run")

    from specdist.results.evaluate.run import run_evaluation

    text, document = run_evaluation(config)
    print(text, json.dumps(document), sep="\n\n")
    return 0
