"""What ``tests.learning.measured`` and ``.wall_clock`` wrote, for ``python -m tests.readme``."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

MEASURED = REPOSITORY / "jobs/benchmarks/learning-small-pair-cpu.json"
WALL_CLOCK = REPOSITORY / "jobs/benchmarks/learning-wall-clock-cpu.json"


def markdown() -> str:
    """Acceptance by fifths of the rows, without and with learning."""
    found = json.loads(MEASURED.read_text())
    lines = [
        [
            f"{float(temperature):g}",
            name,
            *(f"{share:.3f}" for share in setting[name]["acceptance"]),
            f"{setting[name]['num_steps']:,}",
            str(setting[name]["num_switches"]),
        ]
        for temperature, setting in found["settings"].items()
        for name in ("without", "with")
    ]
    fifths = ("first fifth", "second", "third", "fourth", "last")
    return (
        f"{table(['temperature', 'learning', *fifths, 'steps', 'new drafts'], lines)}\n\n`{found['command']}`"
    )


def wall_clock() -> str:
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
