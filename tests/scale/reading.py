"""How long the readers of a finished run take: a run of many small shards, written without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import specdist
from specdist.data import RunFolder, shard_table
from specdist.data.layout import layout_info
from specdist.data.merging import merge_run
from specdist.data.opening import open_run_folder
from specdist.job.status import StatusReader
from specdist.job.totals import write_total
from specdist.reporting import write_report
from specdist.stats.shard import Stats
from tests.data.samples import row_result
from tests.finished_runs import manifest_with, shard_stats

ROWS_PER_SHARD = 4


def write_run(path: Path, num_shards: int) -> RunFolder:
    """A complete run in ``path``, which does not exist."""
    manifest = manifest_with(
        num_rows=num_shards * ROWS_PER_SHARD,
        rows_per_shard=ROWS_PER_SHARD,
        num_samples=1,
        info=layout_info(num_shards),
    )
    folder = open_run_folder(path, manifest, "seed: 1\n", overwrite=False)
    stats = varied_stats()
    for shard in range(num_shards):
        rows = range(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD)
        inputs = pa.table({"prompt": [f"prompt {row}" for row in rows]})
        table = shard_table(inputs, [row_result(row) for row in rows], first_row=rows[0], num_samples=1)
        folder.finish_shard(shard, table, stats.to_json())
        write_total(folder, shard, num_shards)
    return folder


def varied_stats() -> Stats:
    """With as many sizes of passes as a shard of a real run has."""
    stats = shard_stats(0)
    for size in range(1, 60):
        stats.observe_target_pass(num_tokens=size, time_ns=1000 * size)
    return stats


def seconds_to_read(folder: RunFolder) -> dict[str, float]:
    """Each reader alone, on files that have just been written."""
    return {
        "status": _timed(lambda: StatusReader(folder.path).read()),
        "load_run": _timed(lambda: specdist.load_run(folder.path)),
        "statistics": _timed(lambda: specdist.load_run(folder.path).statistics),
        "report": _timed(lambda: write_report([folder.path])),
        "merge": _timed(lambda: merge_run(folder, folder.path.parent / "merged.arrow")),
    }


def _timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return round(time.monotonic() - start, 2)
