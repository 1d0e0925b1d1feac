"""The table of ``jobs/benchmarks/distill-small-pair-cpu.json``: ``python -m tests.readme`` writes it."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/distill-small-pair-cpu.json"
HEADING = ["temperature", "sequences", "tokens", "held out", "acceptance", "tokens per target pass"]


def markdown() -> str:
    """A line for every training: what it learned from, and the draft before and after it."""
    results = json.loads(RESULTS.read_text())["results"]
    return table(HEADING, [_line(found) for found in results])


def _line(found: dict) -> list[str]:
    before, after = found["before"], found["after"]
    return [
        f"{found['temperature']:g}",
        str(found["num_training_sequences"]),
        f"{found['num_training_tokens']:,}",
        f"{found['num_held_out_tokens']:,} tokens",
        f"{before['acceptance']:.3f} → {after['acceptance']:.3f}",
        f"{before['tokens_per_pass']:.2f} → {after['tokens_per_pass']:.2f}",
    ]
