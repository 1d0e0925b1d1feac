"""--trace: a file per shard beside its statistics, complete whatever happened to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from tests.job.launching import run_here, run_process
from tests.job.test_crash import fork_and_kill, num_logged

SLOW = {"max_batch_rows": 2, "rows_per_shard": 12, "max_new_tokens": 48, "trace": True}


def read_traces(output: Path) -> pa.Table:
    files = sorted(output.glob("stats/*.trace.arrow"))
    return pa.concat_tables(pa.ipc.open_file(file.read_bytes()).read_all() for file in files)


def test_it_holds_every_drafted_token(options: dict[str, Any], tmp_path: Path) -> None:
    ended = run_here(**options, trace=True, output=tmp_path / "run")
    assert ended.code == 0
    traces = read_traces(tmp_path / "run")
    totals = ended.totals
    drafted = traces.num_rows
    accepted = sum(traces.column("is_accepted").to_pylist())
    assert drafted > accepted > 0
    assert accepted / drafted == pytest.approx(totals["draft_acceptance_rate"])
    row_ids = traces.column("row_id").to_pylist()
    assert row_ids == sorted(row_ids)


def test_a_killed_run_ends_with_the_trace_of_an_undisturbed_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    slow = options | SLOW
    assert run_here(**slow, output=tmp_path / "whole").code == 0
    output = tmp_path / "killed"
    code = fork_and_kill(
        lambda: (output / "parts").is_dir() and num_logged(output, 0) > 4, **slow, output=output
    )
    assert code is not None and code < 0
    assert not list(output.glob("stats/shard-00001*"))
    assert run_here(**slow, output=output).code == 0
    assert_same(read_traces(tmp_path / "whole"), read_traces(output))


def assert_same(one: pa.Table, other: pa.Table) -> None:
    exact = ["row_id", "sample_index", "round", "depth", "position", "is_judged", "is_accepted"]
    assert one.select(exact).equals(other.select(exact))
    # Another batch, or a sliced model, rounds otherwise.
    for name in ("entropy", "draft_probability", "top_probability", "acceptance_probability"):
        pairs = zip(one.column(name).to_pylist(), other.column(name).to_pylist(), strict=True)
        assert all(left == pytest.approx(right, rel=1e-3, abs=1e-5) for left, right in pairs)


def test_a_traced_run_cannot_go_on_without(options: dict[str, Any], tmp_path: Path) -> None:
    assert run_here(**options, trace=True, output=tmp_path / "run").code == 0
    refused = run_here(**options, output=tmp_path / "run")
    assert refused.code != 0 and "trace" in refused.stderr


def test_without_a_draft_there_is_nothing_to_trace(options: dict[str, Any], tmp_path: Path) -> None:
    ended = run_here(**(options | {"draft": None}), trace=True, output=tmp_path / "run")
    assert ended.code == 0 and not list(tmp_path.glob("run/stats/*.arrow"))


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", ["none", "ahead"])
def test_ranks_trace_too(options: dict[str, Any], overlap: str, tmp_path: Path) -> None:
    """The draft's features travel: in turns they are those of one process."""
    output = tmp_path / "ranks"
    ended = run_process(3, **options, tp_size=2, overlap=overlap, trace=True, output=output)
    assert ended.code == 0, ended.stderr
    found = read_traces(output)
    assert (0 in found.column("round").to_pylist()) == (overlap == "ahead")
    if overlap == "none":
        assert run_here(**options, trace=True, output=tmp_path / "alone").code == 0
        assert_same(found, read_traces(tmp_path / "alone"))
