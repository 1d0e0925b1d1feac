"""Train a head on the draft from the output of ``specdist collect``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdist.cli.ending import log_to_stderr, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.training.heads.config import TrainConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """The last line on stdout is a JSON document."""
    log_to_stderr()
    config = parse_arguments(TrainConfig, arguments)

    from specdist.training.heads.run import run_training

    info = run_training(config)
    metrics = {name: value for name, value in info.metrics.items() if name != "history"}
    print(json.dumps({"output": config.output, "kind": info.kind, **metrics}))
    return 0
