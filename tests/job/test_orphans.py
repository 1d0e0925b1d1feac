"""Ranks do not outlive their launcher: a relaunch would load a second copy of the models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from specdist.job.ranks.signals import LAUNCHER_VARIABLES
from tests.job.gate import Gate
from tests.job.killing import wait_until
from tests.job.launching import command, logged_rows, read_output, run_here
from tests.ranks import REPOSITORY

SLOW = {"limit": 12, "rows_per_shard": 6, "max_num_seqs": 2, "max_new_tokens": 30}
SOON_S = 30
# A process that starts {rank}, and tells its number.
LAUNCHER = """
import subprocess, sys, time

process = subprocess.Popen([sys.executable, "-c", {rank!r}])
print(process.pid, flush=True)
time.sleep(3600)
"""
# A process that does not leave by itself when it is to stop. It tells when it is ready, and how it ends.
RANK = """
import logging, os, sys, time
from specdist.job.ranks import signals
logging.basicConfig(stream=sys.stderr)
signals.ORPHAN_GRACE_S = 0.2
def end(code):
    print("ended with", code, file=sys.stderr, flush=True)
    os._exit(code)
signals.end_process = end
stop = signals.StopRequest(launcher=signals.find_launcher())
stop.defer_signals()
print("ready", flush=True)
time.sleep(3600)
"""


@contextmanager
def launched(
    tmp_path: Path, *, is_rank: bool
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, Path]]:
    """A launcher, the process that it has started, and what that one says on stderr."""
    words = tmp_path / "stderr"
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if is_rank:
        environment[LAUNCHER_VARIABLES[0]] = "some-launch"
    with words.open("w") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER.format(rank=RANK)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=REPOSITORY,
            env=environment,
        )
    assert launcher.stdout is not None
    told = sorted(launcher.stdout.readline().strip() for _ in range(2))
    rank = psutil.Process(int(told[0]))
    assert told[1] == "ready"
    try:
        yield launcher, rank, words
    finally:
        launcher.kill()
        launcher.wait()
        if rank.is_running():
            rank.kill()


def wait_for(process: psutil.Process) -> None:
    """Wait until the process has ended; it has no parent here that could wait for it."""
    _, alive = psutil.wait_procs([process], timeout=SOON_S)
    assert not alive or process.status() == psutil.STATUS_ZOMBIE


def test_a_rank_whose_round_does_not_end_ends_with_its_launcher(tmp_path: Path) -> None:
    with launched(tmp_path, is_rank=True) as (launcher, rank, words):
        launcher.kill()
        wait_for(rank)
        assert f"the launcher (process {launcher.pid}) is gone" in words.read_text()
        assert "ended with 75" in words.read_text()


def test_a_job_that_was_started_by_hand_outlives_its_shell(tmp_path: Path) -> None:
    with launched(tmp_path, is_rank=False) as (launcher, rank, words):
        launcher.kill()
        launcher.wait()
        wait_until(lambda: rank.ppid() != launcher.pid)
        time.sleep(1.2)
        assert rank.is_running() and words.read_text() == ""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank_and_loses_no_row(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The real one. The same command goes on where its ranks were."""
    output = tmp_path / "run"
    launch = command(2, **(options | SLOW), output=output)
    launch[1:3] = ["-m", "specdist.job.ranks.launch"]
    gate = Gate(tmp_path / "gate")
    process = subprocess.Popen(
        launch,
        env=os.environ | gate.environment,
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    gone = f"the launcher (process {process.pid}) is gone"
    ranks: list[psutil.Process] = []
    try:
        gate.let_through(lambda: logged_rows(output, 1).count(b"\n") >= 2, lambda: process.poll() is None)
        ranks = psutil.Process(process.pid).children(recursive=True)
        rows = logged_rows(output, 1)
        process.kill()
        process.wait()
        # Until it knows, the rank that schedules might finish the shard once the gate is open.
        wait_until(lambda: any(gone in path.read_text() for path in (output / "logs").glob("*rank-0.log")))
        gate.open()
        _, alive = psutil.wait_procs(ranks, timeout=SOON_S)
        assert alive == []
    finally:
        process.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    logs = [path.read_text() for path in (output / "logs").iterdir()]
    assert len(logs) == 2
    # The others may have ended because the first of them did.
    assert any(gone in log for log in logs)
    # The round was ended, and the shard given back.
    assert all(
        json.loads(path.read_text())["replica"] is None for path in (output / "leases").glob("shard-*")
    )
    assert logged_rows(output, 1).startswith(rows)
    assert run_here(**(options | SLOW), output=output).totals["complete"] is True
    assert read_output(output).num_rows == SLOW["limit"]
