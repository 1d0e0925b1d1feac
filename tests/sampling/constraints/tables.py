"""The READMEs' table of constrained generation, from what ``tests.sampling.constraints.measure`` has
written."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from specdist.utils.table import Table, decimals

FOLDER = Path(__file__).parent.parent.parent.parent / "jobs/benchmarks"
# Times, and the ends of many completions: the second file adds to the counts of the first.
TIMES, COUNTS = "constraints-throughput-small-pair-cpu.json", "constraints-valid-small-pair-cpu.json"


def markdown() -> str:
    """A row for each schema, and one sentence."""
    files = [FOLDER / name for name in (TIMES, COUNTS)]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]
    times = found[0]["schemas"]

    def count(of: str, name: str) -> int:
        return sum(each["schemas"][name][of] for each in found)

    rows: list[dict[str, Any]] = [
        {
            "schema": name,
            "completions": f"{count('num_completions', name):,}",
            "ended by themselves": f"{count('num_stopped', name):,}",
            "of these instances": f"{count('num_valid', name):,}",
            "drafted tokens that were forced": decimals(one["forced_share"]),
            "accepted": decimals(one["acceptance"]),
            "accepted without": decimals(one["acceptance_unconstrained"]),
            "throughput over without": decimals(one["throughput_over_unconstrained"]),
        }
        for name, one in times.items()
    ]
    ratios = [one["throughput_over_unconstrained"] for one in times.values()]
    return (
        f"{Table.of(rows).markdown()}\n\n"
        "In the median of the ten schemas the throughput over that without a constraint is "
        f"{statistics.median(ratios):.2f}, and at least 1 for {sum(ratio >= 1 for ratio in ratios)} of them."
    )
