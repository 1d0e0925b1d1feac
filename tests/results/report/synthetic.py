"""Run folders without any model: rows whose statistics are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from tests.data.samples import row_result

MS = 1_000_000
NUM_TOKENS = 40
BEGIN_UNIX_NS = 1_700_000_000 * 10**9
FAILED = {
    "finish_reason": "error", "error": "the prompt has <b>9000</b> tokens", "completion_ids": (),
    "completion": "", "num_completion_tokens": 0,
}  # fmt: skip
COMPLETED = {"completion_ids": (7,) * NUM_TOKENS, "num_completion_tokens": NUM_TOKENS}


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """What kind of run; ``num_finished`` shards of ``num_shards`` are done."""

    num_shards: int = 4
    num_finished: int = 4
    rows_per_shard: int = 6
    num_draft_tokens: int = 4
    is_exact: bool = True
    has_draft: bool = True
    num_error_rows: int = 0
    num_replicas: int = 1
    world_size: int = 3


def write_run(path: Path, run: SyntheticRun) -> Path:
    """The folder of such a run; the same every time."""
    folder = open_run_folder(path, _manifest(run), yaml.safe_dump(_config(run)), overwrite=False)
    for shard in range(run.num_finished):
        _finish_shard(folder, shard, run)
    return path


def _config(run: SyntheticRun) -> dict[str, Any]:
    policy = "fixed" if run.is_exact else "sprinter"
    return {
        "prompts": "data/prompts.parquet", "output": "runs/synthetic", "target": "models/target",
        "draft": "models/draft" if run.has_draft else None, "policy": policy if run.has_draft else "none",
        "num_draft_tokens": run.num_draft_tokens,
        "overlap": "synchronous",
        "acceptance": "rejection", "temperature": 0.7, "max_new_tokens": NUM_TOKENS, "stop": [],
        "rows_per_shard": run.rows_per_shard,
    }  # fmt: skip


def _manifest(run: SyntheticRun) -> Manifest:
    return Manifest(
        fingerprint={
            "num_rows": run.num_shards * run.rows_per_shard,
            "rows_per_shard": run.rows_per_shard,
            "num_samples": 1,
            "num_draft_tokens": run.num_draft_tokens if run.has_draft else None,
        },
        info={
            "exact": run.is_exact, "reproducibility": "tokens", "target": "models/target",
            "draft": "models/draft" if run.has_draft else None, "world_size": run.world_size, "device": "cpu",
            "draft_placement": ("own" if run.world_size > 1 else "shared") if run.has_draft else None,
            "versions": {"specdist": "0.1.0", "torch": "2.13.0"},
        },
    )  # fmt: skip


def _finish_shard(folder: RunFolder, shard: int, run: SyntheticRun) -> None:
    first, num_completions = shard * run.rows_per_shard, run.rows_per_shard - run.num_error_rows
    rows = range(first, first + run.rows_per_shard)
    results = [
        row_result(row, 0, **(FAILED if row - first < run.num_error_rows else COMPLETED)) for row in rows
    ]
    stats = Stats(
        num_rows=run.rows_per_shard,
        num_error_rows=run.num_error_rows,
        num_completions=num_completions,
        num_completion_tokens=NUM_TOKENS * num_completions,
    )
    if num_completions:
        _add_rounds(stats, shard, run)
    inputs = pa.table({"reference": [f"reference {row}" for row in rows]})
    table = shard_table(inputs, results, first_row=first, num_samples=1, is_exact=run.is_exact)
    document = {
        "exact": run.is_exact,
        "replica": f"replica-{shard % run.num_replicas}",
        **stats.to_json(),
    }
    folder.finish_shard(shard, table, document)


def _add_rounds(stats: Stats, shard: int, run: SyntheticRun) -> None:
    """Blocks of every accepted length, and their times; a replica's shards one after the other."""
    num_drafted = run.num_draft_tokens if run.has_draft else 0
    for block in range(20 + shard):
        num_accepted = block % (num_drafted + 1)
        trusted = 0 if run.is_exact else num_accepted
        stats.observe_block(num_drafted=num_drafted, num_accepted=num_accepted, num_trusted=trusted)
        stats.num_target_passes += 1
    if run.has_draft:
        stats.num_draft_passes += 20
        stats.draft_ns.draft = 80 * MS
        stats.draft_ns.transfer = MS * stats.num_target_passes
    stats.target_ns.verify = 20 * MS * stats.num_target_passes
    stats.target_ns.prefill, stats.target_ns.host = 30 * MS, 20 * MS
    stats.target_ns.idle = stats.draft_ns.draft
    stats.draft_ns.idle = stats.target_ns.verify if run.has_draft else 0
    stats.wall_ns = stats.target_ns.total
    stats.peak_memory_bytes.target = 500 * 2**20
    begin_ns = BEGIN_UNIX_NS + shard // run.num_replicas * stats.wall_ns
    stats.work_span.extend(begin_ns, begin_ns + stats.wall_ns)
