"""Collect training examples for a head on the draft."""

from __future__ import annotations

from collections.abc import Sequence

from specdist.cli.ending import heavy_imports, tells_mistakes
from specdist.config.arguments import parse_arguments
from specdist.training.collect.config import CollectConfig


@tells_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the job; returns its exit code. Rank 0's last line on stdout is a JSON document."""
    config = parse_arguments(CollectConfig, arguments)

    with heavy_imports():
        from specdist.training.collect.run import run_collection

    return run_collection(config)
