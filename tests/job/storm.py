"""Replicas that are killed and paused at random moments, over one folder after another.

    python -m tests.job.storm --kills 200

keeps three replicas at work and SIGKILLs one of them after the other, each replaced by a new one, until so
many have died; a complete run is compared with an undisturbed one, byte by byte, and the next one begins. The
suite runs a short version.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
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
    run_here,
    shard_bytes,
    shard_files,
    shard_stats,
)
from tests.job.pair import build_pair
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
    "claim_timeout": 1,
}
MAX_LIFE_S = 1.0
PAUSED_SHARE = 0.2


def start_replica(**options: Any) -> BaseProcess:
    """Start a replica; its output goes to a file beside the run's folder."""
    words = words_folder(options["output"])
    words.mkdir(exist_ok=True)
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


def join_all(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(TIMEOUT_S)
    return [process.exitcode for process in processes]


def num_safe_rows(output: Path) -> int:
    """In part logs and complete shards."""
    return sum(
        NUM_ROWS // NUM_SHARDS
        if (output / "shards" / f"shard-{shard:05d}.json").exists()
        else len(logged_rows(output, shard).splitlines())
        for shard in range(NUM_SHARDS)
    )


def storm(
    output: Path, options: dict[str, Any], *, num_kills: int, num_replicas: int, rng: random.Random
) -> int:
    """One run, in which replicas are killed, replaced and paused until it is complete, or so many have been
    killed and the others have completed it. Returns how many were killed."""
    finished: dict[Path, int] = {}
    num_killed = 0
    with replicas(num_replicas, **options, output=output) as processes:
        while num_killed < num_kills and all(process.exitcode is None for process in processes):
            time.sleep(rng.random() * MAX_LIFE_S)
            index = rng.randrange(len(processes))
            victim = processes[index]
            if victim.exitcode is None and rng.random() < PAUSED_SHARE:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(victim.pid or 0, signal.SIGSTOP)
                    time.sleep(rng.random() * 2 * options["claim_timeout"])
                    os.kill(victim.pid or 0, signal.SIGCONT)
                continue
            victim.kill()
            victim.join()
            if victim.exitcode != -signal.SIGKILL:
                break
            num_killed += 1
            processes[index] = start_replica(**options, output=output)
            now = {path: path.stat().st_mtime_ns for path in shard_files(output)}
            assert finished.items() <= now.items(), "a finished shard was written again"
            finished = now
        codes = join_all(processes)
        words = "\n---\n".join(path.read_text() for path in words_folder(output).iterdir())
        assert codes == [0] * num_replicas, f"exit codes {codes}\n{words}"
    return num_killed


def storms(
    folder: Path, options: dict[str, Any], *, num_kills: int, num_replicas: int, rng: random.Random
) -> Iterator[int]:
    """Run after run until so many replicas have been killed; yields the number so far after
    each run. ``folder`` has an undisturbed run in ``undisturbed``."""
    num_killed = num_runs = 0
    while num_killed < num_kills:
        output = folder / f"run-{num_runs}"
        num_killed += storm(
            output, options, num_kills=num_kills - num_killed, num_replicas=num_replicas, rng=rng
        )
        check_whole(output, folder / "undisturbed")
        num_runs += 1
        yield num_killed


def check_whole(output: Path, undisturbed: Path) -> None:
    """Every row once, no byte different, and nothing left over."""
    assert shard_bytes(output) == shard_bytes(undisturbed)
    rows = Counter(read_output(output)["row_id"].to_pylist())
    assert rows == dict.fromkeys(range(NUM_ROWS), 1)
    assert sum(stats["num_rows"] for stats in shard_stats(output)) == NUM_ROWS
    left = [path for name in ("shards", "stats", "parts", "claims") for path in (output / name).iterdir()]
    kept = {".arrow", ".json"}
    left = [path for path in left if path.suffix not in kept and not path.name.startswith("setup.")]
    assert left == [], left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = build_pair(folder / "pair")
        options = SHARED | {
            "prompts": pair.prompts, "target": pair.target, "draft": pair.draft, "device": "cpu",
        }  # fmt: skip
        assert run_here(**options, output=folder / "undisturbed").code == 0
        totals = storms(folder, options, num_kills=chosen.kills, num_replicas=chosen.replicas, rng=rng)
        for num_runs, num_killed in enumerate(totals, 1):
            print(f"{num_killed} killed in {num_runs} runs: all rows there, once, every byte the same")  # noqa: T201


if __name__ == "__main__":
    main()
