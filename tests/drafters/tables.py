"""What ``tests.drafters.measured`` wrote, as a table."""

from __future__ import annotations

import json

from tests.ranks import REPOSITORY

RESULT = REPOSITORY / "jobs/benchmarks/memory-small-pair-cpu.json"
SOURCES = ("draft", "memory", "both")


def markdown() -> str:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    cases: dict[tuple[str, int, float], dict[str, float]] = {}
    for run in found["runs"]:
        case = run["prompts"], run["epoch"], run["temperature"]
        cases.setdefault(case, {})[run["source"]] = run["tokens_per_pass"]
    lines = [
        "| prompts | temperature | draft | memory | both | both / draft |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (prompts, epoch, temperature), tokens in cases.items():
        name = prompts if epoch == 1 else f"{prompts}, after a run over the same prompts"
        cells = [name, f"{temperature:g}", *(f"{tokens[source]:.2f}" for source in SOURCES)]
        lines.append(f"| {' | '.join(cells)} | {tokens['both'] / tokens['draft']:.3f} |")
    return "\n".join([*lines, "", f"`{found['command']}`"])
