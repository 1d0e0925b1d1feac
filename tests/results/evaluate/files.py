"""Merged files and run folders with given completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from specdist.data.leases.opening import open_run_folder
from specdist.data.run.manifest import Manifest
from specdist.data.stats.rows import RowResult, shard_table
from specdist.results.evaluate.results import write_arrow
from tests.data.samples import row_result

FAILED = {
    "finish_reason": "error",
    "error": "the prompt has no tokens",
    "completion_ids": (),
    "completion": "",
}


def results(completions: Sequence[str | Sequence[str] | dict[str, Any]]) -> list[RowResult]:
    """A row for each: its completion, the completions of its samples, or changes to a result."""
    found = []
    for row_id, given in enumerate(completions):
        samples = given if isinstance(given, (list, tuple)) else [given]
        for index, sample in enumerate(samples):
            changes = sample if isinstance(sample, dict) else {"completion": sample}
            found.append(row_result(row_id, index, **changes))
    return found


def table(inputs: dict[str, Any], completions: Sequence[Any], *, is_exact: bool = True) -> pa.Table:
    rows = results(completions)
    inputs = inputs or {"id": list(range(len(completions)))}
    num_samples = len(rows) // len(completions)
    return shard_table(pa.table(inputs), rows, first_row=0, num_samples=num_samples, is_exact=is_exact)


def merged_file(path: Path, inputs: dict[str, Any], completions: Sequence[Any], **options: Any) -> Path:
    write_arrow(path, table(inputs, completions, **options))
    return path


SETTINGS = {
    "num_rows": 0, "rows_per_shard": 100, "num_samples": 1, "target": "a", "draft": "b", "dtype": "float32",
    "policy": "fixed", "acceptance": "rejection", "temperature": 0, "top_k": 0, "top_p": 1.0, "seed": 0,
    "max_new_tokens": 8, "max_seq_len": 128, "stop": None,
}  # fmt: skip


def run_folder(path: Path, inputs: dict[str, Any], completions: Sequence[Any], **settings: Any) -> Path:
    """A run of one finished shard, or unfinished if there are fewer ``completions`` than ``num_rows``."""
    fingerprint = {**SETTINGS, "num_rows": len(completions), **settings}
    info = {"exact": settings.get("policy") != "sprinter", "world_size": 1, "reproducibility": "tokens"}
    folder = open_run_folder(path, Manifest(fingerprint=fingerprint, info=info), "seed: 0\n", False)
    rows = table(inputs, completions, is_exact=info["exact"])
    reasons = rows["finish_reason"].to_pylist()
    stats = {
        "num_drafts": 1,
        "num_rows": len(completions),
        "num_completions": len(reasons) - reasons.count("error"),
        "num_cut_completions": reasons.count("length"),
        "num_error_rows": reasons.count("error"),
    }
    folder.finish_shard(0, rows, stats)
    return path
