"""How long the readers of a run of many small shards take, which is written without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import specdist
from specdist.data import Membership, RunFolder, shard_table
from specdist.data.claims import shard_name, split_name
from specdist.data.layout import layout_info
from specdist.data.merging import merge_run
from specdist.data.opening import open_run_folder
from specdist.job.status import StatusReader
from specdist.job.totals import write_total
from specdist.reporting import write_report
from specdist.stats.shard import Stats
from tests.data.samples import row_result
from tests.finished_runs import manifest_with, shard_stats

ROWS_PER_SHARD, NUM_SPLITS, SILENT_AFTER_S = 4, 2, 3600.0


def seconds_by_state(path: Path, num_shards: int, *, num_unfinished: int) -> dict[str, dict[str, float]]:
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
    found = {}
    if unfinished:
        found["at work"] = seconds_to_read(folder)
        for shard, members in unfinished.items():
            _finish(folder, shard, num_shards, stats)
            members[0].claims.forget_shard(shard, folder.claims_level(shard))
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
    """A replica holds the shard, and others splits of it, of a row each; each has logged a row."""
    members = [Membership(folder.path, silent_after_s=SILENT_AFTER_S) for _ in range(1 + NUM_SPLITS)]
    level, first_row = folder.claims_level(shard), shard * ROWS_PER_SHARD
    for number, member in enumerate(members):
        member.create_folder()
        member.heartbeat.beat()
        if number == 0:
            claim = member.claims.take(shard_name(shard, level), None)
        else:
            offered = members[0].claims.offer(split_name(shard, number, level), [first_row + number])
            assert offered is not None
            claim, _ = member.claims.take_split(offered) or (None, ())
        assert claim is not None
        with folder.parts(shard, claim.generation, split=number or None) as log:
            log.append(row_result(first_row + number))
            log.snapshot(stats.to_json())
    return members


def varied_stats() -> Stats:
    """With as many sizes of passes as a shard of a real run has."""
    stats = shard_stats(0)
    for size in range(1, 60):
        stats.observe_target_pass(num_tokens=size, time_ns=1000 * size)
    return stats


def seconds_to_read(folder: RunFolder) -> dict[str, float]:
    """Each reader alone, on files that have just been written; a run that is not complete is not merged."""
    readers: dict[str, Callable[[], object]] = {
        "status": lambda: StatusReader(folder.path).read(),
        "load_run": lambda: specdist.load_run(folder.path),
        "statistics": lambda: specdist.load_run(folder.path).statistics,
        "report": lambda: write_report([folder.path]),
    }
    if not folder.missing_shards():
        readers["merge"] = lambda: merge_run(folder, folder.path.parent / "merged.arrow")
    return {name: _timed(reader) for name, reader in readers.items()}


def _timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return round(time.monotonic() - start, 2)
