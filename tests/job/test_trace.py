"""--trace: a file per shard beside its statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from tests.job.launching import Ended, run_here, shard_bytes
from tests.job.ranks import fork_ranks

# Ranks choose these tokens from shards of the vocabulary.
SAMPLED = {"temperature": 1, "top_k": 40, "seed": 3}


def read_traces(output: Path) -> pa.Table:
    files = sorted(output.glob("stats/*.trace.arrow"))
    return pa.concat_tables(pa.ipc.open_file(file.read_bytes()).read_all() for file in files)


def test_it_holds_every_drafted_token_and_changes_none(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path
) -> None:
    ended = run_here(**options, trace=True, output=tmp_path / "run")
    assert ended.code == 0
    assert shard_bytes(tmp_path / "run") == shard_bytes(greedy[0])
    traces = read_traces(tmp_path / "run")
    totals = ended.totals
    drafted = traces.num_rows
    accepted = sum(traces.column("is_accepted").to_pylist())
    assert drafted > accepted > 0
    assert accepted / drafted == pytest.approx(totals["draft_acceptance_rate"])
    row_ids = traces.column("row_id").to_pylist()
    assert row_ids == sorted(row_ids)
    again = run_here(**options, output=tmp_path / "run")
    assert again.code == 2 and "trace" in again.stderr


@pytest.mark.ranks
def test_ranks_trace_too(options: dict[str, Any], tmp_path: Path) -> None:
    """The draft's features travel; what they say of both models is the matter of
    tests/engine/test_tracing.py."""
    sampled, output = options | SAMPLED | {"trace": True, "limit": 10}, tmp_path / "ranks"
    ended = fork_ranks(2, **sampled, overlap="synchronous", output=output)
    assert ended.code == 0, ended.stderr
    traces = read_traces(output)
    assert len(traces) and min(traces.column("draft_probability").to_pylist()) > 0
