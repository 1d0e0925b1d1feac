"""Several replicas over one folder: they come, go, are killed and paused, and every row is there once.

Each replica is one process with both models; the file system is all that they share.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.job.fault_injection import (
    NUM_SHARDS,
    SHARED,
    check_whole,
    inject_faults,
    join_all,
    num_safe_rows,
    replicas,
)
from tests.job.gate import Gate
from tests.job.launching import TIMEOUT_S, run_here, shard_bytes

NUM_REPLICAS, NUM_KILLS = 3, 2


@pytest.fixture(scope="module")
def shared(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The options of a run, and the folder of one that nothing disturbed."""
    output = tmp_path_factory.mktemp("shared") / "run"
    assert run_here(**(options | SHARED), output=output).code == 0
    return options | SHARED, output


def test_a_replica_that_is_paused_past_its_leases_age_does_no_harm(
    shared: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Its process is there, so only its silence tells; when it wakes up, its shards are another's. And what
    replicas work on is not overwritten."""
    options, undisturbed = shared
    output, gate = tmp_path / "run", Gate(tmp_path / "gate")
    with replicas(2, gate=gate, **options, output=output) as processes:
        paused, other = processes
        gate.let_through(lambda: len(held_by(output, paused.pid)) > 0 and num_safe_rows(output) >= 3)
        ended = run_here(**options, output=output, overwrite=True)
        assert ended.code == 2 and " on " in ended.stderr and "--overwrite" in ended.stderr
        os.kill(paused.pid or 0, signal.SIGSTOP)
        gate.open()
        other.join(TIMEOUT_S)
        assert other.exitcode == 0
        before = shard_bytes(output)
        assert len(before) == NUM_SHARDS
        os.kill(paused.pid or 0, signal.SIGCONT)
        assert join_all([paused]) == [0]
    assert shard_bytes(output) == before
    check_whole(output, undisturbed)


def held_by(output: Path, pid: int | None) -> list[str]:
    """Leases of shards that name a replica with this process."""
    found = []
    for path in (output / "leases").glob("shard-*"):
        try:
            holder = json.loads(path.read_text())["replica"]
        except (OSError, ValueError):
            continue
        if holder is not None and f"-{pid}-" in holder:
            found.append(path.name)
    return found


def test_faults_of_three_replicas_end_with_the_same_files(
    shared: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Killed, replaced and paused at random moments, in one run after another."""
    options, undisturbed = shared
    num_left, rng = NUM_KILLS, random.Random(0)
    while num_left > 0:
        output = tmp_path / f"run-{num_left}"
        num_left -= inject_faults(output, options, num_kills=num_left, num_replicas=NUM_REPLICAS, rng=rng)
        check_whole(output, undisturbed)
