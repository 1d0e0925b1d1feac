"""The host's time between two passes, before and after a change: `python -m tests.lab.emulation.host_times
BEFORE --output FILE`.

BEFORE is a checkout of the repository. Both versions emulate the same pair in turn, batch size by batch
size, each with its own emulation (in older ones a part of jobs/benchmark.py). The table of
jobs/benchmarks/tables is made from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specdist.data.leases.heartbeat import now_utc
from specdist.data.store.files import write_json
from specdist.utils.table import Table, decimals
from tests.lab.emulation.results import EmulationResult, Outcome

PAIR = ("--emulate", "h100-sxm", "--target", "70b", "--draft", "1b", "--tp_size", "4")
MODES = ("target_only", "synchronous", "asynchronous", "branches")
BATCH_SIZES = (1, 8, 32, 64, 128)
NUM_ROUNDS = 30
BEFORE, AFTER = "before", "after"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="a checkout of the version before")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=BATCH_SIZES)
    options = parser.parse_args()
    versions = {BEFORE: options.before.resolve(), AFTER: Path.cwd()}
    found: dict[str, list[Any]] = {name: [] for name in versions}
    for batch_size in options.batch_sizes:
        for name, checkout in versions.items():
            found[name].append(_emulated(checkout, batch_size))
    result = {
        "command": "python " + " ".join(["-m", "tests.lab.emulation.host_times", *sys.argv[1:]]),
        "date": now_utc(),
        "commits": {name: _commit(checkout) for name, checkout in versions.items()},
        **found,
    }
    write_json(options.output, result)
    sys.stdout.write(table(result) + "\n")


def _emulated(checkout: Path, batch_size: int) -> dict[str, Any]:
    """The result of the checkout's own emulation, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        is_moved = (checkout / "tests/lab/emulation/__main__.py").exists()
        program = ["-m", "tests.lab.emulation"] if is_moved else ["jobs/benchmark.py"]
        command = [sys.executable, *program, *PAIR, "--modes", *MODES, "--policies", "fixed"]
        command += ["--batch_sizes", str(batch_size), "--rounds", str(NUM_ROUNDS), "--output", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return document


def _commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()


def table(result: dict[str, Any]) -> str:
    """A row per batch size and mode."""
    rows: list[dict[str, str | int | None]] = []
    for pair in zip(result[BEFORE], result[AFTER], strict=True):
        for before, after in zip(*(EmulationResult.from_json(one).outcomes for one in pair), strict=True):
            rows.append(
                {
                    "batch": after.batch_size,
                    "mode": after.mode,
                    "exposed before": f"{before.exposed_host_share:.1%}",
                    "after": f"{after.exposed_host_share:.1%}",
                    "ms before": decimals(before.exposed_host_share * before.round_ms),
                    "ms after": decimals(after.exposed_host_share * after.round_ms),
                    "to the request": _both(before, after, "request_ms"),
                    "to the draft's pass": _both(before, after, "drafting_ms"),
                    "to the reply": _both(before, after, "reply_ms"),
                    "to the target's pass": _both(before, after, "next_pass_ms"),
                }
            )
    commits = result["commits"]
    about = (
        f"before: commit {commits[BEFORE]}; after: {commits[AFTER]}; {result['date']}: `{result['command']}`"
    )
    return f"{Table.of(rows, num_names=2).markdown()}\n\n{about}"


def _both(before: Outcome, after: Outcome, name: str) -> str | None:
    if before.path is None or after.path is None:
        return None
    return f"{getattr(before.path, name):.2f} → {getattr(after.path, name):.2f}"


if __name__ == "__main__":
    main()
