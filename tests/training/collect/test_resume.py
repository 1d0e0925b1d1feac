"""Killed and resumed, or sharded over ranks, a collection has the examples of an undisturbed one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdist.cli import collect as main
from tests.job.gate import Gate
from tests.job.killing import fork_and_kill
from tests.job.launching import (
    logged_rows,
    read_output,
    run_here,
    shard_bytes,
    shard_files,
)
from tests.job.ranks import fork_ranks, started_ranks
from tests.training.collect.plain import HALF_TOLERANCE, hidden_of

SLOW = {"max_num_seqs": 3, "max_new_tokens": 24, "rows_per_shard": 6, "kind": "verifier"}
NUM_SHARDS = 4


def num_complete(output: Path) -> int:
    return len(list((output / "shards").glob("*.json")))


def num_logged(output: Path) -> int:
    return logged_rows(output / "responses", 0).count(b"\n")


def test_a_process_killed_at_every_stage_ends_with_the_same_files(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options = options | SLOW
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "data"
    assert run_here(main, **options, output=undisturbed).code == 0
    moments: list[Callable[[], bool]] = [
        lambda: num_logged(output) >= 2,
        lambda: num_complete(output / "responses") == NUM_SHARDS,
        lambda: len(shard_files(output)) >= 2,
    ]
    for number, moment in enumerate(moments):
        gate = Gate(tmp_path / f"gate-{number}")
        assert fork_and_kill(moment, main, gate, **options, output=output) == -signal.SIGKILL
        assert num_complete(output) < NUM_SHARDS, "too late: the job was over"
    modified = shard_files(output)[0].stat().st_mtime_ns
    assert run_here(main, **options, output=output).totals["num_rows"] == 24
    assert shard_files(output)[0].stat().st_mtime_ns == modified, "a finished shard was written again"
    assert len(shard_bytes(output)) == NUM_SHARDS
    assert shard_bytes(output) == shard_bytes(undisturbed)


def test_a_complete_collection_is_left_alone(
    acceptance: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    output = shutil.copytree(acceptance, tmp_path / "data")
    before = shard_bytes(output)
    totals = run_here(main, **options, kind="acceptance", output=output).totals
    assert totals["num_examples"] == len(read_output(acceptance))
    assert totals["num_bytes"] == sum(map(len, before.values()))
    assert shard_bytes(output) == before


@pytest.mark.ranks
def test_three_ranks_collect_what_one_does(options: dict[str, Any], verifier: Path, tmp_path: Path) -> None:
    """Two ranks share the target and its vocabulary, the third draws; killed on the way, after which the
    first draws itself."""
    output, gate = tmp_path / "data", Gate(tmp_path / "gate")
    options = options | {"kind": "verifier", "tp_size": 2, "output": output}
    with started_ranks(3, main, gate, **options) as ranks:
        gate.let_through(lambda: num_complete(output) >= 1, ranks.is_running)
        assert ranks.is_running(), "the job ended before it could be killed"
    assert fork_ranks(2, main, **options).totals["num_rows"] == 24
    found, expected = read_output(output), read_output(verifier)
    for name in ("row_id", "prefix_kind", "position", "token_id"):
        assert found[name].to_pylist() == expected[name].to_pylist(), name
    for name in ("ratio", "acceptance", "entropy", "probability", "top_probability"):
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(hidden_of(found), hidden_of(expected), **HALF_TOLERANCE)
