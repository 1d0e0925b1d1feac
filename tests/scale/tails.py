"""How long a run goes on after its first replica has nothing to do.

    python -m tests.scale.tails --seeds 6
    python -m tests.scale.tails --real [--code FOLDER --name before]

Simulated: the project's own recorder, claims, splits and part logs on a virtual clock, with log-normal
lengths of completions, beside the same without splits and in the order of the input. Real: four replicas with
tiny models, as users start them, of this code or of another checkout. The last line on stdout is a JSON
document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from specdist.utils.table import Table, decimals
from tests.job.launching import JOB, arguments
from tests.job.pair import build_pair, some_texts, write_arrow
from tests.ranks import REPOSITORY
from tests.scale.tail import TailOutcome, TailScenario, TailSimulation

RESULTS = REPOSITORY / "jobs/benchmarks/tails.json"
NUM_REPLICAS, NUM_SHARDS, ROWS_PER_SHARD = 4, 5, 64
# By which the logarithms of lengths of samples of a row differ.
SIBLING_SIGMA = 0.4
WAITS, TIME = "waiting until these are completed", "%Y-%m-%d %H:%M:%S,%f"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="simulated runs, or real ones")
    parser.add_argument("--real", action="store_true", help="real replicas")
    parser.add_argument(
        "--code", type=Path, default=REPOSITORY, help="checkout whose jobs/generate.py is run"
    )
    parser.add_argument("--name", default="after", help="of the code, in the results")
    parser.add_argument("--output", type=Path, help="JSON file to which the results are added")
    options = parser.parse_args()
    results = []
    if options.real:
        with tempfile.TemporaryDirectory() as folder:
            runs = [real_run(Path(folder) / str(seed), options.code, seed) for seed in range(options.seeds)]
        results.append(summary("real", options.name, runs, NUM_SHARDS, ROWS_PER_SHARD))
    else:
        for has_rates, num_samples in itertools.product((False, True), (1, 4)):
            for is_new in (False, True):
                outcomes = [
                    simulated_run(seed, num_samples, is_new=is_new, has_rates=has_rates)
                    for seed in range(options.seeds)
                ]
                kind = f"simulated, {'speculating' if has_rates else 'plain'}, {num_samples} per row"
                name = "after" if is_new else "before"
                runs = [(min(found.first_idle_s, found.end_s), found.end_s) for found in outcomes]
                results.append(summary(kind, name, runs, 10, 512 // num_samples))
                results[-1]["longest_left_s"] = [round(found.longest_left_s, 2) for found in outcomes]
                print(json.dumps(results[-1]), flush=True)
    document = {"command": f"python -m tests.scale.tails {' '.join(sys.argv[1:])}", "results": results}
    if options.output is not None and options.output.exists():
        document["results"] = json.loads(options.output.read_text())["results"] + results
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def summary(
    kind: str, name: str, runs: list[tuple[float, float]], num_shards: int, rows_per_shard: int
) -> dict[str, Any]:
    """``runs``: seconds until the first replica was idle, and until the end."""
    return {
        "kind": kind, "name": name, "replicas": NUM_REPLICAS, "shards": num_shards, "rows_per_shard":
        rows_per_shard, "tails_s": [round(max(0.0, end - idle), 2) for idle, end in runs], "totals_s":
        [round(end, 2) for _, end in runs],
    }  # fmt: skip


def simulated_run(seed: int, num_samples: int, *, is_new: bool, has_rates: bool) -> TailOutcome:
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync", lambda descriptor: None):
        scenario = TailScenario(
            is_new=is_new, seed=seed, num_samples=num_samples, rows_per_shard=512 // num_samples,
            has_rates=has_rates, sibling_sigma=SIBLING_SIGMA if num_samples > 1 else 0.0,
        )  # fmt: skip
        return TailSimulation(Path(folder) / "run", scenario).run()


def real_run(folder: Path, code: Path, seed: int) -> tuple[float, float]:
    """Times since the first replica has begun to generate; one begins in the moment in which its models are
    loaded."""
    pair = build_pair(folder / "pair")
    texts = some_texts(NUM_SHARDS * ROWS_PER_SHARD, seed=seed)
    prompts = write_arrow(folder / "prompts.arrow", {"prompt": texts})
    output = folder / "run"
    words = arguments(
        prompts=prompts, target=pair.target, draft=pair.draft, device="cpu", policy="fixed", overlap="none",
        temperature=1, top_p=0.95, seed=seed, max_new_tokens=96, max_num_seqs=4,
        rows_per_shard=ROWS_PER_SHARD, output=output,
    )  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    job = code / JOB.relative_to(REPOSITORY)
    replicas = [
        subprocess.Popen(
            [sys.executable, str(job), *words], cwd=code, env=environment, stdout=subprocess.DEVNULL
        )
        for _ in range(NUM_REPLICAS)
    ]
    assert [replica.wait() for replica in replicas] == [0] * NUM_REPLICAS
    lines = [line for log in (output / "logs").iterdir() for line in log.read_text().splitlines()]
    begun = min(_time(line) for line in lines if "shards to do" in line)
    end = max(path.stat().st_mtime for path in (output / "shards").glob("*.json"))
    waits = [_time(line) for line in lines if WAITS in line]
    return min([*waits, end]) - begun, end - begun


def _time(line: str) -> float:
    return datetime.strptime(" ".join(line.split()[:2]), TIME).timestamp()


def _longest_left(entry: dict[str, Any]) -> str | None:
    """Of those that run when the first replica is idle: known of simulated runs."""
    return decimals(mean(entry["longest_left_s"])) if "longest_left_s" in entry else None


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
                "longest left alone, s": _longest_left(entry),
                "of before": f"{tail_s / mean(before['tails_s']):.0%}",
                "run, of before": f"{total_s / mean(before['totals_s']):.0%}",
            }
        )
    return Table.of(rows, num_names=3).markdown()


if __name__ == "__main__":
    main()
