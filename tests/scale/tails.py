"""How long a run goes on after its first replica has nothing to do.

    python -m tests.scale.tails --seeds 6
    python -m tests.scale.tails --real

Simulated: the project's own recorder, leases, sub-shards and part logs on a virtual clock, with log-normal
lengths of completions, beside the same without sub-shards and in the order of the input. Real: four replicas
with tiny models, whose passes take as long as those of large ones (paced.py). The last line on stdout is a
JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from specdist.utils.table import Table, decimals
from tests.ranks import REPOSITORY
from tests.scale.paced import SCENARIO, paced_run
from tests.scale.tail import TailOutcome, TailScenario, TailSimulation

RESULTS = REPOSITORY / "jobs/benchmarks/tails.json"
NUM_REPLICAS = 4
PACES = ("plain", "speculating")
# By which the logarithms of lengths of samples of a row differ.
SIBLING_SIGMA = 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="simulated runs, or real ones")
    parser.add_argument("--real", action="store_true", help="real replicas")
    parser.add_argument("--pace", nargs="+", choices=PACES, default=PACES, help="of decoding")
    parser.add_argument("--output", type=Path, help="JSON file to which the results are added")
    options = parser.parse_args()
    command = f"python -m tests.scale.tails {' '.join(sys.argv[1:])}"
    results = []
    for pace, num_samples in itertools.product(options.pace, (1,) if options.real else (1, 4)):
        has_rates = pace == "speculating"
        for is_new in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                outcomes = [
                    paced_run(Path(folder) / str(seed), seed, is_new=is_new, has_rates=has_rates)
                    if options.real
                    else simulated_run(seed, num_samples, is_new=is_new, has_rates=has_rates)
                    for seed in range(options.seeds)
                ]
            kind = f"real, {pace}" if options.real else f"simulated, {pace}, {num_samples} per row"
            shape = (
                (SCENARIO.num_shards, SCENARIO.rows_per_shard) if options.real else (10, 512 // num_samples)
            )
            results.append(summary(kind, "after" if is_new else "before", outcomes, *shape, command))
            print(json.dumps(results[-1]), flush=True)
    document = {"results": results}
    if options.output is not None and options.output.exists():
        document["results"] = json.loads(options.output.read_text())["results"] + results
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def summary(
    kind: str, name: str, outcomes: list[TailOutcome], num_shards: int, rows_per_shard: int, command: str
) -> dict[str, Any]:
    """Seconds from the first idle replica to the end (``tails_s``), of whole runs (``totals_s``), and of the
    longest sequence that runs when the first replica is idle, alone."""
    return {
        "kind": kind,
        "name": name,
        "command": command,
        "replicas": NUM_REPLICAS,
        "shards": num_shards,
        "rows_per_shard": rows_per_shard,
        "tails_s": [round(found.tail_s, 2) for found in outcomes],
        "totals_s": [round(found.end_s, 2) for found in outcomes],
        "longest_left_s": [round(found.longest_left_s, 2) for found in outcomes],
    }


def simulated_run(seed: int, num_samples: int, *, is_new: bool, has_rates: bool) -> TailOutcome:
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync", lambda descriptor: None):
        scenario = TailScenario(
            is_new=is_new, seed=seed, num_samples=num_samples, rows_per_shard=512 // num_samples,
            has_rates=has_rates, sibling_sigma=SIBLING_SIGMA if num_samples > 1 else 0.0,
        )  # fmt: skip
        return TailSimulation(Path(folder) / "run", scenario).run()


def markdown() -> str:
    """The results as a table."""
    rows = []
    entries = json.loads(RESULTS.read_text())["results"]
    for entry in entries:
        before = next(
            other for other in entries if (other["kind"], other["name"]) == (entry["kind"], "before")
        )
        tail_s, total_s = mean(entry["tails_s"]), mean(entry["totals_s"])
        rows.append(
            {
                "runs": f"{len(entry['tails_s'])} {entry['kind']}",
                "code": entry["name"],
                "shards": f"{entry['shards']} of {entry['rows_per_shard']} rows",
                "run, s": decimals(total_s),
                "first idle to end, s": decimals(tail_s),
                "longest left alone, s": decimals(mean(entry["longest_left_s"])),
                "that, of before": f"{mean(entry['longest_left_s']) / mean(before['tails_s']):.0%}",
                "of before": f"{tail_s / mean(before['tails_s']):.0%}",
                "run, of before": f"{total_s / mean(before['totals_s']):.0%}",
            }
        )
    return Table.of(rows, num_names=3).markdown()


if __name__ == "__main__":
    main()
