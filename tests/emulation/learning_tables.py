"""The table of ``jobs/benchmarks/learning-emulated.json``: ``python -m tests.readme`` writes it."""

from __future__ import annotations

import json
from typing import Any

from specdist.utils.markdown import table
from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks/learning-emulated.json"


def markdown() -> str:
    """Tokens per second with learning over those without, a line per temperature and batch size; and in
    brackets the seconds for which the draft has learned."""
    found: dict[tuple[float, int], dict[str, dict[str, Any]]] = {}
    for one in json.loads(RESULTS.read_text(encoding="utf-8"))["settings"]:
        found.setdefault((one["temperature"], one["batch_size"]), {})[one["mode"]] = one
    modes = list(dict.fromkeys(mode for line in found.values() for mode in line))
    heading = ["temperature", "batch size", *(mode.replace("_", " ") for mode in modes)]
    return table(heading, [_line(*key, line, modes) for key, line in found.items()])


def _line(temperature: float, batch_size: int, line: dict[str, Any], modes: list[str]) -> list[str]:
    cells = {mode: f"{one['ratio']:.4f} ({one['learned_s']:.1f} s)" for mode, one in line.items()}
    return [f"{temperature:g}", str(batch_size), *(cells.get(mode, "") for mode in modes)]
