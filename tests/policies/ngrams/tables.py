"""What ``tests.policies.ngrams.measured`` and ``tests.policies.ngrams.costs`` wrote, as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.ranks import REPOSITORY

RESULTS = REPOSITORY / "jobs/benchmarks"
# Of a row's own text; of other rows and earlier runs.
OWN, OTHERS, COSTS = (
    f"ngram-{name}.json" for name in ("small-pair-cpu", "others-small-pair-cpu", "costs-cpu")
)
SOURCES = ("draft", "ngram")


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def markdown() -> str:
    results = [_result(name) for name in (OWN, OTHERS)]
    cases: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for run in (run for found in results for run in found["runs"]):
        name = run["prompts"]
        if run["num_samples"] > 1:
            name += f", {run['num_samples']} samples, `--ngram_rows`"
        if run["epoch"] > 1:
            name += ", after a run over the same prompts"
        cases.setdefault((name, run["temperature"]), {})[run["source"]] = run
    lines = [
        "| prompts | temperature | tokens per pass: draft | n-gram | n-gram / draft | "
        "tokens/s: draft | n-gram | n-gram / draft |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (name, temperature), runs in cases.items():
        tokens = [runs[source]["tokens_per_pass"] for source in SOURCES]
        cells = [name, f"{temperature:g}", *(f"{each:.2f}" for each in tokens)]
        cells += [f"{tokens[-1] / tokens[0]:.3f}", *_rates([runs[source] for source in SOURCES])]
        lines.append(f"| {' | '.join(cells)} |")
    for found in results:
        lines += ["", f"`{found['command']}`"]
    return "\n".join(lines)


def _rates(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Completion tokens per second of the median repeat, and the median of the ratio of the last to the first
    within a repeat, with its range."""
    if any("wall_s" not in run for run in runs):
        return ["-"] * (len(runs) + 1)
    rates = [[run["num_completion_tokens"] / seconds for seconds in run["wall_s"]] for run in runs]
    ratios = [last / first for first, last in zip(rates[0], rates[-1], strict=True)]
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [*(f"{median(each):,.0f}" for each in rates), spread]


def costs() -> str:
    found = _result(COSTS)
    lines = [
        "| sequences | other texts | update, µs | look-up, µs | lengths, µs | of a pass of 8B | of 70B |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in found["runs"]:
        times = [f"{run[name]:.0f}" for name in ("update_us", "look_up_us", "choice_us")]
        shares = [f"{100 * run[f'share_of_{shape}']:.1f}%" for shape in ("8b", "70b")]
        cells = [str(run["batch_size"]), f"{run['store_tokens']:,}", *times, *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{found['command']}`"])
