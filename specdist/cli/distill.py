"""Train a draft on what the target says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specdist.cli.ending import heavy_imports, tells_mistakes
from specdist.config.arguments import parse_given
from specdist.training.drafts.config import DistillConfig

CONFIG_NAME = "config.yaml"


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; returns its exit code. Rank 0's last line on stdout is a JSON document.

    A word before all options is the folder of a run, whose options are then those in its ``config.yaml``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-"):
        words[:1] = [f"--config={Path(words[0]) / CONFIG_NAME}", f"--output={words[0]}"]
    config, given = parse_given(DistillConfig, words)

    with heavy_imports():
        from specdist.training.drafts.run import run_distillation

    return run_distillation(config, given)
