"""A job that is asked to stop saves finished rows, gives its shards back, and all its ranks leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdist.job.ranks.signals import EXIT_STOPPED
from tests.job.gate import Gate
from tests.job.killing import wait_until
from tests.job.launching import (
    TIMEOUT_S,
    logged_rows,
    run_here,
    shard_bytes,
    shard_files,
)
from tests.job.ranks import started_ranks
from tests.job.telling import fork_telling
from tests.ranks import REPOSITORY

# A process that does not leave by itself when it is stopped, {gentle} or not, with {grace} seconds to end; a
# second interrupt within {echo} seconds does not count.
WAITING = """
import logging, sys, time
from specdist.job.ranks import signals
logging.basicConfig(stream=sys.stderr)
signals.GRACE_S = {grace}
signals.ECHO_S = {echo}
stop = signals.StopRequest()
if {gentle}:
    stop.defer_signals()
print("ready", flush=True)
time.sleep(3600)
"""


def rows_of_second_shard(gate: Gate, output: Path) -> bytes:
    """The first two or more; the next one waits, and the first shard is complete."""
    gate.let_through(lambda: len(recorded(output)) == 1 and logged_rows(output, 1).count(b"\n") >= 2)
    return logged_rows(output, 1)


def recorded(output: Path) -> list[Path]:
    """Completion records."""
    return list((output / "shards").glob("*.json"))


def stop(
    gate: Gate, output: Path, processes: Sequence[int], number: signal.Signals, num_logs: int = 1
) -> None:
    """Send the signal while a row waits, and let that go on when all have taken note."""
    for process in processes:
        os.kill(process, number)
    said = f"{number.name}: stopping after this round"
    wait_until(lambda: sum(said in path.read_text() for path in (output / "logs").iterdir()) == num_logs)
    gate.open()


def check_given_back(output: Path, rows: bytes) -> None:
    """The second shard has no holder and all its rows, and no heartbeat is left."""
    (lease,) = (output / "leases").glob("shard-*")
    assert json.loads(lease.read_text())["replica"] is None
    assert logged_rows(output, 1).startswith(rows)
    assert list((output / "leases").glob("*.beat")) == []
    assert len(shard_files(output)) == 1


def test_a_job_that_is_asked_to_stop_saves_its_rows_and_gives_its_shards_back(
    slow: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    options, undisturbed = slow
    output, gate, number = tmp_path / "run", Gate(tmp_path / "gate"), signal.SIGINT
    process = fork_telling(tmp_path / "words", gate=gate, **options, output=output)
    try:
        rows = rows_of_second_shard(gate, output)
        stop(gate, output, [process.pid or 0], number)
        process.join(TIMEOUT_S)
    finally:
        process.kill()
    said = (tmp_path / "words").read_text()
    assert process.exitcode == EXIT_STOPPED, said
    assert f"{number.name}: stopping after this round" in said and "Traceback" not in said
    totals = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert totals["complete"] is False and totals["num_rows"] == 6
    num_begun = logged_rows(output, 1).count(b'"row":')
    kept = f"{6 + num_begun} of 24 are kept: 6 in finished shards, {num_begun} in unfinished shards"
    assert f"rows        {kept}" in said and "; to resume, start" in said
    check_given_back(output, rows)
    assert run_here(**options, output=output).totals["complete"] is True
    assert shard_bytes(output) == shard_bytes(undisturbed)


@pytest.mark.ranks
def test_ranks_that_all_get_the_signal_leave_together(
    slow: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """A cluster's scheduler may send the signal to every process itself, and its warning is SIGUSR1."""
    options, undisturbed = slow
    output, gate = tmp_path / "run", Gate(tmp_path / "gate")
    with started_ranks(2, gate=gate, **options, output=output) as world:
        rows = rows_of_second_shard(gate, output)
        stop(gate, output, [process.pid or 0 for process in world.processes], signal.SIGUSR1, num_logs=2)
        for process in world.processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == EXIT_STOPPED
    check_given_back(output, rows)
    assert run_here(**options, output=output).totals["complete"] is True
    assert shard_bytes(output) == shard_bytes(undisturbed)


def waiting(*, gentle: bool, grace: float = 60.0, echo: float = 60.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(gentle=gentle, grace=grace, echo=echo)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_before_the_first_row_one_signal_ends_the_job() -> None:
    process = waiting(gentle=False)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED
    assert "SIGTERM with nothing to save" in stderr


def interrupted(process: subprocess.Popen[str]) -> None:
    """Interrupt it, and wait until it has taken note."""
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "stopping after this round" in process.stderr.readline()


def test_a_second_interrupt_ends_at_once_unless_it_comes_with_the_first() -> None:
    """From a launcher and a scheduler; a SIGTERM does not."""
    process = waiting(gentle=True, echo=1.0)
    interrupted(process)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.poll() is None
    time.sleep(1.0)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGINT again: ending at once" in stderr and "stopping after this round" not in stderr


def test_a_job_that_does_not_come_to_the_end_of_its_round_is_ended() -> None:
    process = waiting(gentle=True, grace=0.3)
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED
    assert "not ended" in stderr
