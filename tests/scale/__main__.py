"""Counts the file operations of many replicas on one run folder.

    python -m tests.scale --replicas 1000 --shards 10000
    python -m tests.scale --reading --shards 100000

The replicas are simulated (simulation.py): the project's own leases, heartbeats and publishing, on a virtual
clock; with ``--processes`` they are real ones, in real time, and those that vanish are killed. The last line
on stdout is a JSON document with ``metadata_ops_per_replica_s`` and ``reads_per_replica_s`` (with ``--store``
``requests_per_replica_s``) in the first
minute (``start``), until the first replica waits (``middle``), and from then on (``tail``). All files lie in
memory where the machine has a place for that, and nothing is made durable. With ``--reading`` the seconds are
measured that the readers of a run take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from specdist.data.run.run_folder import RunFolder
from tests.scale.processes import run_processes
from tests.scale.reading import measured_by_state, seconds_to_read
from tests.scale.sharing import SharingSimulation
from tests.scale.simulation import Outcome, Scenario, Simulation, operations
from tests.scale.tail import TailScenario

MEMORY = Path("/dev/shm")
# More replicas would take hours to list the leases for themselves.
MOST_LISTED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--shard_seconds", type=float, default=60.0, help="that a shard takes on average")
    parser.add_argument("--vanishing", type=float, default=0.02, help="share of the replicas that vanish")
    parser.add_argument("--processes", action="store_true", help="real replicas, in real time")
    parser.add_argument(
        "--sub_shards", action="store_true", help="replicas share the rows of the last shards"
    )
    parser.add_argument("--rows_per_shard", type=int, default=8, help="with --sub_shards")
    parser.add_argument("--store", action="store_true", help="on an object store: its requests are counted")
    parser.add_argument("--reading", action="store_true", help="measure the readers of a finished run")
    parser.add_argument(
        "--unfinished", type=int, default=0, help="with --reading: shards at work, with sub-shards"
    )
    parser.add_argument("--run", type=Path, help="with --reading: the folder of a complete run of --shards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to which the result is added")
    parser.add_argument("--name", default="after", help="of the code, in that file")
    options = parser.parse_args()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        mock.patch("os.fsync", lambda descriptor: None),
    ):
        if options.reading:
            if options.run is not None:
                found = {"complete": seconds_to_read(RunFolder(options.run))}
            else:
                found = measured_by_state(
                    Path(folder) / "run", options.shards, num_unfinished=options.unfinished
                )
            for state, of_state in found.items():
                result = {
                    "name": options.name,
                    "kind": "readers",
                    "command": command(),
                    "shards": options.shards,
                    "state": state,
                    "unfinished": options.unfinished if state == "at work" else 0,
                    **of_state,
                }
                _add(result, options.output)
            return
        outcome = run(Path(folder), options)
    assert sorted(outcome.published_by) == list(range(options.shards))
    kind = "real" if options.processes else "simulated"
    print(f"{options.replicas} {kind} replicas, {options.shards} shards, each published once:")
    print(
        f"{outcome.end_s:.0f} s of the replicas' time, {time.monotonic() - started:.0f} s of this machine's"
    )
    result = {
        "name": options.name,
        "kind": kind,
        "replicas": options.replicas,
        "shards": options.shards,
        "shard_seconds": options.shard_seconds,
        "vanishing": options.vanishing,
        **({} if outcome.published_s is None else {"published_s": round(outcome.published_s)}),
        "end_s": round(outcome.end_s),
        **(
            {"rows_per_shard": options.rows_per_shard, "sub_shards": outcome.num_sub_shards}
            if options.sub_shards
            else {}
        ),
        **operations(outcome),
        "command": command(),
    }
    _add(result, options.output)


def command() -> str:
    """Without where its result goes."""
    given = iter(sys.argv[1:])
    kept = [word for word in given if word not in ("--output", "--name") or not next(given)]
    return " ".join(["python -m tests.scale", *kept])


def _add(result: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        document = json.loads(output.read_text()) if output.exists() else {"results": []}
        document["results"].append(result)
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(result))


def run(folder: Path, options: argparse.Namespace) -> Outcome:
    if options.processes:
        return run_processes(
            folder,
            num_replicas=options.replicas,
            num_shards=options.shards,
            shard_s=options.shard_seconds,
            vanishing=options.vanishing,
        )
    if options.sub_shards:
        tail = TailScenario(
            num_replicas=options.replicas,
            num_shards=options.shards,
            rows_per_shard=options.rows_per_shard,
            max_num_seqs=4,
            seed=options.seed,
        )
        return SharingSimulation(folder / "shared", tail, vanishing=options.vanishing).run_counted()
    scenario = Scenario(
        num_replicas=options.replicas,
        num_shards=options.shards,
        shard_s=options.shard_seconds,
        vanishing=options.vanishing,
        seed=options.seed,
        on_store=options.store,
        is_indexed=options.replicas > MOST_LISTED and not options.store,
    )
    return Simulation(folder / "run", scenario).run()


if __name__ == "__main__":
    main()
