"""Replicas over one folder, killed and paused at random moments, and what must be there at the end."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.job.launching import (
    TIMEOUT_S,
    logged_rows,
    read_output,
    shard_bytes,
    shard_files,
    shard_stats,
)
from tests.job.telling import fork_telling

NUM_ROWS = 24
NUM_SHARDS = 8
# Shards of three rows, two at a time: replicas meet often. A second without a heartbeat counts as the end.
SHARED = {
    "rows_per_shard": NUM_ROWS // NUM_SHARDS,
    "max_num_seqs": 2,
    "max_new_tokens": 40,
    "temperature": 1,
    "top_p": 0.9,
    "lease_timeout": 1,
}
MAX_LIFE_S, PAUSED_SHARE = 1.0, 0.2


def start_replica(**options: Any) -> BaseProcess:
    """Start a replica; its output goes to a file beside the run's folder."""
    words = words_folder(options["output"])
    words.mkdir(parents=True, exist_ok=True)
    return fork_telling(words / uuid.uuid4().hex, **options)


def words_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}-words")


@contextmanager
def replicas(num: int, **options: Any) -> Iterator[list[BaseProcess]]:
    """Replicas at work; the list may be changed, and those in it at the end are killed."""
    processes = [start_replica(**options) for _ in range(num)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def join_all(processes: list[BaseProcess], timeout_s: float = TIMEOUT_S) -> list[int | None]:
    """Exit codes, None of a replica that does not end."""
    until = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return [process.exitcode for process in processes]


def num_safe_rows(output: Path) -> int:
    """In part logs and complete shards."""
    return sum(
        NUM_ROWS // NUM_SHARDS
        if (output / "shards" / f"shard-{shard:05d}.json").exists()
        else len(logged_rows(output, shard).splitlines())
        for shard in range(NUM_SHARDS)
    )


def inject_faults(
    output: Path, options: dict[str, Any], *, num_kills: int, num_replicas: int, rng: random.Random
) -> int:
    """One run, in which replicas are killed, replaced and paused until it is complete, or so many have been
    killed and the others have completed it. Returns how many were killed."""
    finished: dict[str, int] = {}
    options = options | {"output": output}
    num_killed = 0
    with replicas(num_replicas, **options) as processes:
        while num_killed < num_kills and all(process.exitcode is None for process in processes):
            time.sleep(rng.random() * MAX_LIFE_S)
            index = rng.randrange(len(processes))
            victim = processes[index]
            if rng.random() < PAUSED_SHARE:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(victim.pid or 0, signal.SIGSTOP)
                    time.sleep(rng.random() * 2 * options["lease_timeout"])
                    os.kill(victim.pid or 0, signal.SIGCONT)
                continue
            victim.kill()
            victim.join()
            if victim.exitcode != -signal.SIGKILL:
                break
            num_killed += 1
            processes[index] = start_replica(**options)
            now = {path.name: path.stat().st_mtime_ns for path in shard_files(output)}
            assert finished.items() <= now.items(), "a finished shard was written again"
            finished = now
        codes = join_all(processes)
        words = "\n---\n".join(filter(None, (path.read_text() for path in words_folder(output).iterdir())))
        assert codes == [0] * num_replicas, f"exit codes {codes}\n{words}"
    return num_killed


def check_whole(output: Path, undisturbed: Path) -> None:
    """Every row once, no byte different, and nothing left over."""
    assert shard_bytes(output) == shard_bytes(undisturbed)
    assert Counter(read_output(output)["row_id"].to_pylist()) == dict.fromkeys(range(NUM_ROWS), 1)
    assert sum(stats["num_rows"] for stats in shard_stats(output)) == NUM_ROWS
    left = [path for name in ("shards", "stats", "parts", "leases") for path in (output / name).iterdir()]
    kept = {".arrow", ".json"}
    left = [path for path in left if path.suffix not in kept and not path.name.startswith("setup.")]
    assert left == [], left
