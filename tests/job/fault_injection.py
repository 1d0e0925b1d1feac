"""Replicas that are killed and paused at random moments, over one folder after another.

    python -m tests.job.fault_injection --kills 200

keeps three replicas at work and SIGKILLs one of them after the other, each replaced by a new one, until so
many have died; a complete run is compared with an undisturbed one, byte by byte, and the next one begins.
Others are paused for longer than a lease lasts without a heartbeat. With ``--machines`` a replica may be on
a machine of its own, which vanishes with it and with its files: the others see but silence. ``--shards 2``
has fewer shards than replicas, so that these share rows of a shard. With ``--store`` the runs are in a bucket
of an S3 server, and every so many of its answers are errors; with ``--leases``, too, they meet in a folder,
since the server creates no object exclusively. The suite runs a short version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specdist.data.run.layout import DECISIONS
from specdist.data.store.access import leases_folder
from specdist.data.store.copies import mirrored
from specdist.data.store.storage import StorePath, storage_path
from tests.data.s3 import BUCKET, Failure, s3_server
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
from tests.job.telling import SHOW_STACK, fork_telling

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
MAX_LIFE_S, LOOK_S, MAX_PAUSE_S = 1.0, 0.1, 15.0
PAUSED_SHARE, MACHINE_SHARE, FAULT_SHARE = 0.2, 0.4, 0.03
# On a store, where a look is several requests: all within half of this, however busy the machine is.
STORE_TIMEOUT_S = 12.0
# The run goes on after the last kill, on a slow store one setup after the other.
END_TIMEOUT_S = 600.0


@dataclass
class Tally:
    """What has been done to replicas. ``sub_shards``: names of those of shards that were seen leased."""

    num_killed: int = 0
    num_paused: int = 0
    num_vanished: int = 0
    sub_shards: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.num_killed} killed, {self.num_vanished} of them with their machine, {self.num_paused} "
            f"paused, {len(self.sub_shards)} sub-shards seen at work"
        )


@dataclass(frozen=True)
class Machines:
    """Where replicas run: on this machine, or with ``share`` of them, each on one of its own."""

    rng: random.Random
    share: float = 0.0

    def start(self, options: dict[str, Any]) -> tuple[BaseProcess, str]:
        """A replica, and its machine: empty for this one."""
        machine = uuid.uuid4().hex[:8] if self.rng.random() < self.share else ""
        chosen = dict(options)
        if "cache_dir" in options:
            chosen["cache_dir"] = options["cache_dir"] / (machine or "this")
        return start_replica(machine=machine, **chosen), machine

    @staticmethod
    def vanish(options: dict[str, Any], machine: str) -> bool:
        """Remove the files of a machine; False for this one."""
        if machine and "cache_dir" in options:
            shutil.rmtree(options["cache_dir"] / machine, ignore_errors=True)
        return bool(machine)


def start_replica(*, machine: str = "", **options: Any) -> BaseProcess:
    """Start a replica; its output goes to a file beside the run's folder."""
    words = words_folder(options["output"])
    words.mkdir(parents=True, exist_ok=True)
    return fork_telling(words / uuid.uuid4().hex, machine=machine, **options)


def words_folder(output: Path) -> Path:
    if isinstance(output, StorePath):
        return output.cache_dir / "words"
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
    """Exit codes, None of a replica that does not end: where it stands is then among its words."""
    until = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid or 0, SHOW_STACK)
            time.sleep(1)
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
    output: Path,
    options: dict[str, Any],
    tally: Tally,
    *,
    num_kills: int,
    num_replicas: int,
    rng: random.Random,
    machine_share: float = 0.0,
    life_s: float = MAX_LIFE_S,
) -> None:
    """One run, in which replicas are killed, replaced and paused until it is complete, or ``num_kills`` in
    all have been killed and the others have completed it."""
    finished: dict[str, object] = {}
    machines = Machines(rng, machine_share)
    options = options | {"output": output}
    places: dict[BaseProcess, str] = {}
    with replicas(0) as processes:
        for _ in range(num_replicas):
            process, places[process] = machines.start(options)
            processes.append(process)
        while tally.num_killed < num_kills and all(process.exitcode is None for process in processes):
            until = time.monotonic() + rng.random() * life_s
            while (left := until - time.monotonic()) > 0:
                tally.sub_shards |= leased_sub_shards(leases_of(output, options))
                time.sleep(min(left, LOOK_S))
            index = rng.randrange(len(processes))
            victim = processes[index]
            if victim.exitcode is None and rng.random() < PAUSED_SHARE:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(victim.pid or 0, signal.SIGSTOP)
                    time.sleep(rng.random() * min(2 * options["lease_timeout"], MAX_PAUSE_S))
                    os.kill(victim.pid or 0, signal.SIGCONT)
                    tally.num_paused += 1
                continue
            victim.kill()
            victim.join()
            if victim.exitcode != -signal.SIGKILL:
                break
            tally.num_killed += 1
            tally.num_vanished += machines.vanish(options, places.pop(victim))
            processes[index], machine = machines.start(options)
            places[processes[index]] = machine
            now = stamps(output)
            assert finished.items() <= now.items(), "a finished shard was written again"
            finished = now
        codes = join_all(processes, END_TIMEOUT_S)
        words = "\n---\n".join(filter(None, (path.read_text() for path in words_folder(output).iterdir())))
        assert codes == [0] * num_replicas, f"exit codes {codes}\n{words}"


def stamps(output: Path) -> dict[str, object]:
    """Of every finished shard's data, what changes if it is written again."""
    if not isinstance(output, StorePath):
        return {path.name: path.stat().st_mtime_ns for path in shard_files(output)}
    found = output.store.below((output / "shards").key)
    return {name: (info.st_mtime, info.version) for name, info in found.items()
            if name.endswith(".arrow")}  # fmt: skip


def leases_of(output: Path, options: dict[str, Any]) -> Path:
    """Where the replicas meet."""
    return leases_folder(output, options.get("leases")) or output / "leases"


def leased_sub_shards(folder: Path) -> set[str]:
    """The names of sub-shards that a replica has leased."""
    with suppress(FileNotFoundError):
        leases = [path.name.partition(".") for path in files_below(folder)]
        return {f"{folder} {name}" for name, _, number in leases
                if name.startswith("subshard-") and number.isdigit() and int(number) > 1}  # fmt: skip
    return set()


def injections(folder: Path, options: dict[str, Any], *, num_kills: int, outputs: Path | None = None,
           **chosen: Any) -> Iterator[Tally]:  # fmt: skip
    """Run after run in ``outputs`` until so many replicas have been killed; yields what was done so far after
    each run. ``folder`` has an undisturbed run in ``undisturbed``."""
    tally, num_runs = Tally(), 0
    while tally.num_killed < num_kills:
        output = (outputs or folder) / f"run-{num_runs}"
        inject_faults(output, options, tally, num_kills=num_kills, **chosen)
        check_whole(
            output,
            folder / "undisturbed",
            has_vanished=tally.num_vanished > 0,
            leases=leases_of(output, options),
        )
        num_runs += 1
        yield tally


def files_below(folder: Path) -> list[Path]:
    if isinstance(folder, StorePath):
        return [folder / name for name in folder.store.below(folder.key)]
    return [path for path in folder.rglob("*") if path.is_file()]


def check_whole(
    output: Path, undisturbed: Path, *, has_vanished: bool = False, leases: Path | None = None
) -> None:
    """Every row once, no byte different, and nothing left over but the last heartbeats of replicas that have
    vanished. ``leases``: where they met, if not in the run's own folder."""
    found = mirrored(output)
    assert shard_bytes(found) == shard_bytes(undisturbed)
    rows = Counter(read_output(found)["row_id"].to_pylist())
    assert rows == dict.fromkeys(range(NUM_ROWS), 1)
    assert sum(stats["num_rows"] for stats in shard_stats(found)) == NUM_ROWS
    folders = [*(output / name for name in ("shards", "stats", "parts")), leases or output / "leases"]
    left = [path for folder in folders for path in files_below(folder)]
    # With a folder of leases, which data was chosen is kept for replicas that wake up late.
    left = [path for path in left if not path.parent.name.startswith(f"{DECISIONS}-")]
    kept = {".arrow", ".json", *((".beat", ".waiting") if has_vanished else ())}
    left = [path for path in left if path.suffix not in kept and not path.name.startswith("setup.")]
    assert left == [], left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--shards", type=int, default=NUM_SHARDS)
    parser.add_argument("--life", type=float, default=MAX_LIFE_S, help="longest time between two kills, in s")
    parser.add_argument("--machines", action="store_true", help="replicas on machines that vanish, too")
    parser.add_argument("--store", action="store_true", help="runs in a bucket of an S3 server that fails")
    parser.add_argument("--leases", action="store_true", help="with --store: they meet in a folder")
    parser.add_argument("--delay", type=float, default=0.0, help="of the S3 server's answers, in s")
    parser.add_argument("--lease_timeout", type=float, help="in s; by default 1, on a store 12")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to which the last line is added")
    chosen = parser.parse_args()
    rng, started, line = random.Random(chosen.seed), time.monotonic(), ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = build_pair(folder / "pair")
        options = pair.job(**SHARED | {"rows_per_shard": NUM_ROWS // chosen.shards})
        if chosen.shards < chosen.replicas:
            # Long enough that holders see who waits before their rows have all begun.
            options |= {"max_num_seqs": 1, "max_new_tokens": 80}
        assert run_here(**options, output=folder / "undisturbed").code == 0
        outputs = folder
        if chosen.store:
            server = stack.enter_context(s3_server())
            server.ignores_conditions = chosen.leases
            os.environ.update(server.environment)
            faults = random.Random(chosen.seed)
            delay = Failure(200, seconds=chosen.delay) if chosen.delay else None
            server.fault = lambda method, path: (
                Failure(faults.choice([500, 503]), after_work=faults.random() < 0.5)
                if faults.random() < FAULT_SHARE else delay
            )  # fmt: skip
            outputs = storage_path(f"s3://{BUCKET}/injection", cache_dir=str(folder / "cache"))
            options |= {"cache_dir": folder / "machines", "lease_timeout": STORE_TIMEOUT_S}
            if chosen.leases:
                options |= {"leases": str(folder / "leases")}
        if chosen.lease_timeout is not None:
            options |= {"lease_timeout": chosen.lease_timeout}
        totals = injections(
            folder, options, num_kills=chosen.kills, outputs=outputs, rng=rng,
            num_replicas=chosen.replicas, life_s=chosen.life,
            machine_share=MACHINE_SHARE if chosen.machines else 0.0,
        )  # fmt: skip
        for num_runs, tally in enumerate(totals, 1):
            line = f"{tally} in {num_runs} runs: all rows there, once, every byte the same"
            print(line, flush=True)  # noqa: T201
    if chosen.output is not None:
        found = json.loads(chosen.output.read_text()) if chosen.output.exists() else {"injections": []}
        took_s = round(time.monotonic() - started)
        found["injections"].append({"command": command_line(), "seconds": took_s, "last_line": line})
        chosen.output.write_text(json.dumps(found, indent=1) + "\n")


def command_line() -> str:
    return shlex.join(["python", "-m", "tests.job.fault_injection", *sys.argv[1:]])


if __name__ == "__main__":
    main()
