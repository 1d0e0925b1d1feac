"""Ranks that die, hang or run out of memory: their replica ends in seconds or goes on; nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdist.job.ranks.restart import LONE_ROW, NUM_RESTARTS, REPLICA, is_out_of_memory
from tests.job import small_device
from tests.job.gate import Gate
from tests.job.launching import (
    TIMEOUT_S,
    Ended,
    command,
    logged_rows,
    read_output,
    run_here,
    shard_bytes,
)
from tests.job.pair import TEXT, some_texts, write_arrow
from tests.job.ranks import started_ranks
from tests.ranks import REPOSITORY

# What the project promises; it takes about one second.
SOON_S = 30
NUM_RANKS, RANK_ZERO = 3, 0


def logs_of(output: Path) -> dict[int, str]:
    """By rank."""
    return {int(path.stem[-1]): path.read_text() for path in (output / "logs").iterdir()}


@pytest.mark.ranks
def test_a_rank_that_dies_ends_its_replica_and_is_named_in_every_log(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0, which has the shards: its lease is that of a dead replica, and a restart takes it over."""
    output = tmp_path / "run"
    changes = {"max_num_seqs": 2, "max_new_tokens": 60, "tp_size": 2}
    gate = Gate(tmp_path / "gate")
    with started_ranks(NUM_RANKS, gate=gate, **(options | changes), output=output) as world:
        processes = world.processes
        gate.let_through(lambda: logged_rows(output, 0).count(b"\n") >= 2, processes[RANK_ZERO].is_alive)
        rows = logged_rows(output, 0)
        os.kill(processes[RANK_ZERO].pid or 0, signal.SIGKILL)
        gate.open()
        begin = time.monotonic()
        for process in processes:
            process.join(SOON_S)
        assert time.monotonic() - begin < SOON_S
        codes = [process.exitcode for process in processes]
    assert codes == [-signal.SIGKILL, 1, 1]
    for other, log in logs_of(output).items():
        if other != RANK_ZERO:
            assert "this replica ends: rank 0 (target 1/2): process " in log
            assert "has disappeared without a message" in log
    assert logged_rows(output, 0).startswith(rows)
    (lease,) = (output / "leases").glob("shard-*")
    assert json.loads(lease.read_text())["replica"] is not None
    assert run_here(**(options | changes | {"tp_size": 1}), output=output).totals["num_rows"] == 24


@pytest.mark.ranks
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_replica_without_memory_for_a_row_starts_over_without_it(
    options: dict[str, Any], tmp_path: Path, tp_size: int
) -> None:
    """The ranks keep their processes; all other rows are those of a replica that has the memory."""
    texts = [*some_texts(3), TEXT, *some_texts(3, seed=1)]
    changes: dict[str, Any] = {
        "prompts": write_arrow(tmp_path / "prompts.arrow", {"prompt": texts}),
        "rows_per_shard": 4,
        "max_new_tokens": 8,
        # Less than a block cannot be run: nothing is left to be halved but two sequences, once.
        "max_num_batched_tokens": 6,
        "max_num_seqs": 2,
    }
    options = options | changes
    assert run_here(**options, output=tmp_path / "undisturbed").code == 0
    expected = read_output(tmp_path / "undisturbed").to_pylist()
    lengths = [row["num_prompt_tokens"] for row in expected]
    assert lengths[3] > max(lengths[:3] + lengths[4:]) + 20
    output = tmp_path / "run"
    ended = subprocess.run(
        command(tp_size, Path(small_device.__file__), **options, tp_size=tp_size, output=output),
        cwd=REPOSITORY,
        env={
            **os.environ,
            small_device.LONGEST: str(lengths[3] - 2),
            small_device.SMALL_RANK: str(tp_size - 1),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    logs = logs_of(output)
    # The replica has kept its name.
    assert len(logs) == tp_size
    for log in logs.values():
        assert tp_size == 1 or "this replica ends: rank 1 (target 2/2): OutOfMemoryError: CUDA out" in log
        assert "OutOfMemoryError: CUDA out of memory." in log and "starting over" in log
    lone = "out of memory while row 3 ran alone, which is recorded as an error"
    assert f"{lone}: continuing with at most 1 sequence and" in ended.stderr
    rows = read_output(output).to_pylist()
    error = rows.pop(3)
    del expected[3]
    assert error["finish_reason"] == "error" and "not even alone" in error["error"]
    assert [row["completion_ids"] for row in rows] == [row["completion_ids"] for row in expected]
    assert json.loads((output / "manifest.json").read_text())["info"]["rows_too_large"] == [[3, 0]]


def test_a_replica_that_has_started_over_halves_the_batch_of_its_run(
    options: dict[str, Any], greedy: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this replica and those that come later; what it had finished stays, --overwrite or not."""
    output = tmp_path / "run"
    shutil.copytree(greedy[0], output)
    for path in (output / "shards").glob("shard-00001*"):
        path.unlink()
    first = output / "shards" / "shard-00000.arrow"
    modified = first.stat().st_mtime_ns
    monkeypatch.setenv(NUM_RESTARTS, "1")
    monkeypatch.setenv(REPLICA, "host-1-abcd")
    monkeypatch.delenv(LONE_ROW, raising=False)
    ended = run_here(**options, overwrite=True, output=output)
    assert ended.totals["complete"] is True
    assert "out of memory: continuing with at most 16 sequences and 1024 tokens at a time" in ended.stderr
    assert "1 of 3 shards to do, at most 16 sequences at a time" in ended.stderr
    assert json.loads((output / "manifest.json").read_text())["info"]["num_batch_halvings"] == 1
    assert shard_bytes(output) == shard_bytes(greedy[0]) and first.stat().st_mtime_ns == modified
    assert (output / "logs" / "host-1-abcd-rank-0.log").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: not enough memory"), True),
        (MemoryError(), True),
        (RuntimeError("device-side assert triggered"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
