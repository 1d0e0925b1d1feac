"""Runs in buckets of other stores than S3, on servers that are running.

    STORAGE_EMULATOR_HOST=http://localhost:9000 python -m tests.job.clouds gs://bucket
    AZURE_STORAGE_CONNECTION_STRING=... python -m tests.job.clouds az://bucket --server "Azurite 3"

Of many threads that create an object one must do so; then three replicas share a run in the bucket, two of
which are killed and replaced, and every byte is compared with an undisturbed run in a folder. The servers:
Google's storage-testbench for gs://, Azurite for az://. The last line on stdout is a JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specdist.data.store.access import check_output
from specdist.data.store.copies import mirrored
from specdist.data.store.storage import StorePath, storage_path
from tests.job.fault_injection import SHARED, join_all, start_replica
from tests.job.launching import run_here, shard_bytes
from tests.job.pair import build_pair

NUM_THREADS, NUM_ROUNDS, NUM_KILLS = 8, 20, 2
# A look at the leases is a few requests; and nobody waits for long for the shards of one that was killed.
TIMEOUT_S = 12.0
LARGE_BYTES = 50_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of a bucket, which is there")
    parser.add_argument("--server", default="", help="its name, for the result")
    parser.add_argument("--output", type=Path, help="JSON file to which the result is added")
    options = parser.parse_args()
    # gcsfs would ask what kind of bucket this is over a protocol that the server does not speak.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = storage_path(f"{options.url}/{uuid.uuid4().hex[:8]}", cache_dir=f"{folder}/cache")
        assert isinstance(root, StorePath)
        check_objects(root, Path(folder))
        check_run(root / "run", Path(folder))
    result = {
        "command": f"python -m tests.job.clouds {shlex.join(sys.argv[1:])}", "server": options.server,
        "url": options.url.partition("://")[0] + "://", "exclusive_creations": NUM_ROUNDS,
        "threads": NUM_THREADS, "killed": NUM_KILLS, "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    if options.output is not None:
        document = json.loads(options.output.read_text()) if options.output.exists() else {"results": []}
        document["results"].append(result)
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(result))


def check_objects(root: StorePath, folder: Path) -> None:
    """What leases and publishing rest on."""
    check_output(root)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for number in range(NUM_ROUNDS):
            won = list(pool.map(lambda n, at=root / f"x{number}": at.create(b"%d" % n), range(NUM_THREADS)))
            assert sum(won) == 1, won
    (root / "small").write_bytes(b"first")
    (root / "small").write_bytes(b"second")
    assert (root / "small").read_bytes() == b"second" and not (root / "none").exists()
    large = folder / "large"
    large.write_bytes(os.urandom(LARGE_BYTES))
    assert (root / "large").upload(large, exclusively=True)
    assert not (root / "large").upload(large, exclusively=True)
    assert (root / "large").read_bytes() == large.read_bytes()
    (root / "large").replace(root / "moved")
    assert set(root.names()) == {"small", "moved", *(f"x{number}" for number in range(NUM_ROUNDS))}
    for name in root.names():
        (root / name).unlink()
    assert root.names() == []


def check_run(output: StorePath, folder: Path) -> None:
    """Replicas that share a run, of which some are killed: the bytes of an undisturbed run."""
    pair = build_pair(folder / "pair")
    options = pair.job(**SHARED | {"lease_timeout": TIMEOUT_S})
    assert run_here(**options, output=folder / "undisturbed").code == 0
    options |= {"output": output, "cache_dir": folder / "cache"}
    processes = [start_replica(**options) for _ in range(3)]
    for _ in range(NUM_KILLS):
        num_done = len((output / "shards").names())
        while processes[0].exitcode is None and len((output / "shards").names()) <= num_done:
            time.sleep(0.2)
        processes[0].kill()
        processes = [*processes[1:], start_replica(**options)]
    assert join_all(processes) == [0, 0, 0]
    assert shard_bytes(mirrored(output)) == shard_bytes(folder / "undisturbed")


if __name__ == "__main__":
    main()
