"""Run folders written without running a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest
from specdist.data.run.run_folder import RunFolder
from specdist.data.stats.rows import shard_table
from specdist.data.stats.shard import Stats
from tests.data.samples import row_result

NUM_ROWS, ROWS_PER_SHARD, NUM_SAMPLES = 7, 3, 2
MANIFEST = Manifest(
    fingerprint={
        "num_rows": NUM_ROWS,
        "rows_per_shard": ROWS_PER_SHARD,
        "num_samples": NUM_SAMPLES,
        "dtype": "float32",
        "policy": "svip",
        "stop_root_entropy": 0.3,
        "max_draft_tokens": 20,
        "acceptance": "rejection",
        "overlap": "synchronous",
        "num_branches": None,
        "temperature": 0.7,
        "top_k": None,
        "top_p": 0.9,
        "max_new_tokens": 32,
        "max_seq_len": 128,
        "stop": None,
        "seed": 0,
    },
    info={
        "exact": True,
        "reproducibility": "tokens",
        "target": "/models/large",
        "draft": "lab/small",
        "prompts": "data/prompts.arrow",
        "world_size": 3,
        "versions": {"specdist": "0.1.0"},
    },
)


def manifest_with(*, info: dict[str, Any] | None = None, **fingerprint: Any) -> Manifest:
    """The usual manifest with these changes."""
    return Manifest(
        fingerprint={**MANIFEST.fingerprint, **fingerprint}, info={**MANIFEST.info, **(info or {})}
    )


def shard_stats(shard: int) -> Stats:
    """Statistics of a shard with one block per row."""
    stats = Stats(
        num_rows=1 + shard, num_completions=(6, 6, 2)[shard], num_completion_tokens=10, wall_ns=2_000_000_000
    )
    stats.num_target_passes += 4 + shard
    stats.observe_block(num_drafted=4, num_accepted=shard)
    return stats


def write_run(path: Path, shards: tuple[int, ...] = (0, 1, 2), manifest: Manifest = MANIFEST) -> RunFolder:
    """A run with an input column of its own; these of its shards are finished."""
    folder = open_run_folder(path, manifest, "seed: 0\n", False)
    plan = folder.plan()
    for shard in shards:
        first, end = plan.bounds(shard)
        inputs = pa.table({"reference": [f"reference {row}" for row in range(first, end)]})
        results = [row_result(row, sample) for row in range(first, end) for sample in range(NUM_SAMPLES)]
        table = shard_table(inputs, results, first_row=first, num_samples=NUM_SAMPLES)
        assert folder.finish_shard(shard, table, shard_stats(shard).to_json())
    return folder
