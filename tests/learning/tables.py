"""What ``tests.learning.wall_clock`` wrote, as a table for ``python -m tests.readme``."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

WALL_CLOCK = REPOSITORY / "jobs/benchmarks/learning-wall-clock-cpu.json"


def markdown() -> str:
    """Every run, in the order in which they were made."""
    found = json.loads(WALL_CLOCK.read_text())
    lines = [
        [
            "with" if run["adapts"] else "without",
            f"{run['tokens_per_s']:,.0f}",
            f"{run['round_ms']:.2f}",
            f"{run['adapt_s']:.1f}",
            f"{run['num_adapt_steps']:,}",
            str(run["num_adapt_switches"]),
        ]
        for run in found["runs"]
    ]
    heading = ["learning", "tokens/s", "ms per round", "seconds of learning", "steps", "new drafts"]
    return f"{table(heading, lines)}\n\n`{found['command']}`"
