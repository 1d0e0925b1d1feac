"""Replicas as processes of their own on one real folder: the same loop as in the simulation, in real time."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from specdist.data.leases.membership import Membership
from specdist.data.leases.shard_queue import ShardQueue
from specdist.data.run.opening import open_run_folder
from specdist.data.run.run_folder import RunFolder
from tests.scale.counting import CountingFiles
from tests.scale.simulation import MIDDLE, PHASES, START, START_S, TABLE, TAIL, Outcome, manifest_of

SILENT_AFTER_S = 60.0


def run_processes(
    folder: Path, *, num_replicas: int, num_shards: int, shard_s: float, vanishing: float
) -> Outcome:
    """``vanishing``: share of the replicas that are killed (SIGKILL) while they work. A replica's tail begins
    when it first waits."""
    run = folder / "run"
    killed = set(range(round(vanishing * num_replicas)))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_work, args=(run, folder, number, num_shards, shard_s))
        for number in range(num_replicas)
    ]
    started = time.monotonic()
    for process in processes:
        process.start()
    for number in killed:
        time.sleep(shard_s / 2)
        pid = processes[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.join()
    outcome = Outcome(end_s=time.monotonic() - started)
    for path in folder.glob("*.counts.json"):
        counts = json.loads(path.read_text())
        for phase in PHASES:
            outcome.operations[phase].update(counts["operations"][phase])
        outcome.replica_s.update(counts["replica_s"])
    complete = RunFolder(run)
    outcome.published_by = {
        shard: complete.read_stats(shard)["by"] for shard in range(num_shards) if complete.is_complete(shard)
    }
    return outcome


def _work(run: Path, results: Path, number: int, num_shards: int, shard_s: float) -> None:
    """Work as a replica; at the end, write what was counted."""
    random.seed(number)
    files = CountingFiles(str(run))
    operations = {phase: Counter[str]() for phase in PHASES}
    replica_s: Counter[str] = Counter()
    started = last = time.monotonic()
    phase = START

    def enter(next_phase: str) -> None:
        nonlocal phase, last
        now = time.monotonic()
        replica_s[phase] += now - last
        phase, last, files.counts = next_phase, now, operations[next_phase]

    enter(START)
    with files.patched():
        manifest = manifest_of(num_shards)
        membership = Membership(run, silent_after_s=SILENT_AFTER_S)
        membership.join()
        with membership.setup():
            is_tidied = membership.another_has_tidied()
            folder = open_run_folder(run, manifest, "", overwrite=False, is_tidied=is_tidied)
        queue = ShardQueue(folder, membership, manifest, num_shards)
        while not queue.is_done:
            if phase == START and time.monotonic() - started > START_S:
                enter(MIDDLE)
            leased = queue.take()
            if leased is None:
                enter(TAIL)
                time.sleep(queue.poll_s)
                continue
            time.sleep(random.uniform(0.5, 1.5) * shard_s)
            if folder.finish_shard(
                leased.shard,
                TABLE,
                {"by": membership.replica},
                is_held=lambda leased=leased: queue.is_held(leased),  # type: ignore[misc]
            ):
                queue.finished(leased)
            else:
                queue.lost(leased)
        membership.leave()
    enter(phase)
    document = {"operations": operations, "replica_s": replica_s}
    (results / f"{number}.counts.json").write_text(json.dumps(document))
