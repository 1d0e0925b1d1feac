"""How long the readers of a run of many small shards take, which is written without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from specdist.data.leases.leases import shard_name, sub_shard_name
from specdist.data.leases.membership import Membership
from specdist.data.run.layout import layout_info
from specdist.data.run.opening import open_run_folder
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from specdist.job.totals.totals import write_total
from tests.data.samples import row_result
from tests.finished_runs import manifest_with, shard_stats

ROWS_PER_SHARD, NUM_SUB_SHARDS, SILENT_AFTER_S = 4, 2, 3600.0


Measured = dict[str, dict[str, float]]


def measured_by_state(path: Path, num_shards: int, *, num_unfinished: int) -> dict[str, Measured]:
    """Of a run that is written into ``path``, which does not exist: while so many of its shards, evenly
    spread, are at work, and when it is complete."""
    manifest = manifest_with(
        num_rows=num_shards * ROWS_PER_SHARD,
        rows_per_shard=ROWS_PER_SHARD,
        num_samples=1,
        info=layout_info(num_shards),
    )
    folder = open_run_folder(path, manifest, "seed: 1\n", overwrite=False)
    stats = varied_stats()
    at_work = [index * num_shards // num_unfinished for index in range(num_unfinished)]
    unfinished = {shard: _hold(folder, shard, stats) for shard in at_work}
    for shard in range(num_shards):
        if shard not in unfinished:
            _finish(folder, shard, num_shards, stats)
    found: dict[str, Measured] = {}
    if unfinished:
        found["at work"] = seconds_to_read(folder)
        for shard, members in unfinished.items():
            _finish(folder, shard, num_shards, stats)
            members[0].leases.forget_shard(shard, folder.leases_level(shard))
            for member in members:
                member.heartbeat.stop()
    return found | {"complete": seconds_to_read(folder)}


def _finish(folder: RunFolder, shard: int, num_shards: int, stats: Stats) -> None:
    rows = range(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD)
    inputs = pa.table({"prompt": [f"prompt {row}" for row in rows]})
    table = shard_table(inputs, [row_result(row) for row in rows], first_row=rows[0], num_samples=1)
    folder.finish_shard(shard, table, stats.to_json())
    write_total(folder, shard, num_shards)


def _hold(folder: RunFolder, shard: int, stats: Stats) -> list[Membership]:
    """A replica holds the shard, and others sub-shards of it, of a row each; each has logged a row."""
    members = [Membership(folder.path, silent_after_s=SILENT_AFTER_S) for _ in range(1 + NUM_SUB_SHARDS)]
    level, first_row = folder.leases_level(shard), shard * ROWS_PER_SHARD
    for number, member in enumerate(members):
        member.create_folder()
        member.heartbeat.beat()
        if number == 0:
            lease = member.leases.take(shard_name(shard, level), None)
        else:
            offered = members[0].leases.offer(sub_shard_name(shard, number, level), [first_row + number])
            assert offered is not None
            lease, _ = member.leases.take_sub_shard(offered) or (None, ())
        assert lease is not None
        with folder.parts(shard, lease.generation, sub_shard=number or None) as log:
            log.append(row_result(first_row + number))
            log.snapshot(stats.to_json())
    return members


def varied_stats() -> Stats:
    """With as many sizes of passes as a shard of a real run has."""
    stats = shard_stats(0)
    for size in range(1, 60):
        stats.observe_target_pass(num_tokens=size, time_ns=1000 * size)
    return stats


def seconds_to_read(folder: RunFolder) -> Measured:
    """``seconds`` and ``peak_mb`` of each reader, alone in a process of its own; a run that is not complete
    is not merged. ``copy``: of the data of all shards into one file, without a look at it."""
    names = ["status", "load_run", "statistics", "report"]
    if not folder.missing_shards():
        names += ["merge", "copy"]
    found = {name: _in_a_process(folder.path, name) for name in names}
    return {
        "seconds": {name: each["seconds"] for name, each in found.items()},
        "peak_mb": {name: each["peak_mb"] for name, each in found.items()},
    }


def _in_a_process(path: Path, name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.scale.readers", str(path), name]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found
