"""Counts the file operations of many replicas on one run folder.

    python -m tests.scale --replicas 1000 --shards 1000

The replicas are simulated (simulation.py): the project's own leases, heartbeats and publishing, on a virtual
clock. The last line on stdout is a JSON document with operations per second and replica (with ``--store`` of
requests) in the first minute (``start``), until the first replica waits (``middle``), and from then on
(``tail``). All files lie in memory where the machine has a place for that, and nothing is made durable.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from unittest import mock

from tests.scale.simulation import Scenario, Simulation, operations

MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--shard_seconds", type=float, default=60.0, help="that a shard takes on average")
    parser.add_argument("--vanishing", type=float, default=0.02, help="share of the replicas that vanish")
    parser.add_argument("--store", action="store_true", help="on an object store: its requests are counted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scenario = Scenario(
        num_replicas=options.replicas,
        num_shards=options.shards,
        shard_s=options.shard_seconds,
        vanishing=options.vanishing,
        seed=options.seed,
        on_store=options.store,
    )
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        mock.patch("os.fsync", lambda descriptor: None),
    ):
        outcome = Simulation(Path(folder) / "run", scenario).run()
    assert sorted(outcome.published_by) == list(range(options.shards))
    print(json.dumps(vars(options) | {"end_s": round(outcome.end_s), **operations(outcome)}))


if __name__ == "__main__":
    main()
