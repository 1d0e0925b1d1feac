"""What trainings and ``tests.distillation.measured`` wrote, as tables for ``python -m tests.readme``."""

from __future__ import annotations

import json

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/distill-small-pair-cpu.json"
EAGLE = REPOSITORY / "jobs/benchmarks/eagle-small-pair-cpu.json"
HEADING = ["temperature", "sequences", "tokens", "tokens of prompts", "held out", "acceptance",
           "tokens per target pass"]  # fmt: skip


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
        f"{found.get('num_prompt_tokens', 0):,}",
        f"{found['num_held_out_tokens']:,} tokens",
        f"{before['acceptance']:.3f} → {after['acceptance']:.3f}",
        f"{before['tokens_per_pass']:.2f} → {after['tokens_per_pass']:.2f}",
    ]


def drafts() -> str:
    """Tokens per target pass of each draft, and how often a token in each place of a block is accepted, with
    all before it."""
    found = json.loads(EAGLE.read_text())
    lines = [
        [
            run["prompts"],
            f"{run['temperature']:g}",
            f"`{run['draft']}`",
            f"{run['tokens_per_pass']:.2f}",
            " ".join(f"{share:.2f}" for share in run["acceptance_per_pos"]),
        ]
        for run in found["runs"]
    ]
    heading = ["prompts", "temperature", "draft", "tokens per target pass", "accepted by place"]
    return f"{table(heading, lines)}\n\n`{found['command']}`"
