"""--trace: a file per shard beside its statistics, complete whatever happened to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from tests.job.gate import Gate
from tests.job.launching import Ended, run_here, shard_bytes
from tests.job.ranks import fork_ranks
from tests.job.test_crash import fork_and_kill, num_logged

# Ranks choose these tokens from shards of the vocabulary.
SAMPLED = {"temperature": 1, "top_k": 40, "seed": 3}
SLOW = {"max_num_seqs": 2, "rows_per_shard": 12, "max_new_tokens": 24, "trace": True}


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


def test_a_killed_run_ends_with_the_trace_of_an_undisturbed_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    slow = options | SLOW | SAMPLED
    assert run_here(**slow, output=tmp_path / "whole").code == 0
    output = tmp_path / "killed"
    code = fork_and_kill(
        lambda: (output / "parts").is_dir() and num_logged(output, 0) > 4,
        gate=Gate(tmp_path / "gate"),
        **slow,
        output=output,
    )
    assert code is not None and code < 0
    assert not list(output.glob("stats/shard-00001*"))
    assert run_here(**slow, output=output).code == 0
    assert_same(read_traces(tmp_path / "whole"), read_traces(output))


def assert_same(one: pa.Table, other: pa.Table) -> None:
    exact = ["row_id", "sample_index", "round", "depth", "position", "token_id", "is_verified", "is_accepted"]
    assert one.select(exact).equals(other.select(exact))
    # Another batch, or a sliced model, rounds otherwise.
    for name in ("entropy", "draft_probability", "top_probability", "acceptance_probability"):
        pairs = zip(one.column(name).to_pylist(), other.column(name).to_pylist(), strict=True)
        assert all(left == pytest.approx(right, rel=1e-3, abs=1e-5) for left, right in pairs)


@pytest.mark.ranks
def test_ranks_trace_too(options: dict[str, Any], tmp_path: Path) -> None:
    """The draft's features travel, also those of what was drafted ahead; what they say of both models is the
    matter of tests/engine/test_tracing.py."""
    sampled, output = options | SAMPLED | {"trace": True, "limit": 10}, tmp_path / "ranks"
    ended = fork_ranks(2, **sampled, overlap="asynchronous", output=output)
    assert ended.code == 0, ended.stderr
    traces = read_traces(output)
    assert 0 in traces.column("round").to_pylist()
    assert min(traces.column("draft_probability").to_pylist()) > 0
