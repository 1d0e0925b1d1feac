"""However a run on GPUs ends, whose graphs hold collectives: soon, with its exit code, without a process."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu import ending
from tests.gpu.generating import fork_gpu_ranks, started_gpu_ranks
from tests.job.killing import wait_until
from tests.job.launching import TIMEOUT_S, logged_rows, run_here, shard_bytes

pytestmark = pytest.mark.ranks

NUM_RANKS, DRAFT_RANK = 3, 2
# The job itself would wait ten minutes for ranks that hang.
SOON_S = 45


@pytest.fixture
def options(options: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return options | {"tp_size": 2, "output": tmp_path / "run", "max_new_tokens": 24}


def held_shards(output: Path) -> list[str]:
    """Names of leases whose newest file names a replica."""
    newest = {path.stem: path for path in sorted(output.glob("leases/**/shard-*"))}
    return [name for name, path in newest.items() if json.loads(path.read_text())["replica"] is not None]


def test_a_complete_run_keeps_no_graph_that_holds_a_collective(options: dict[str, Any]) -> None:
    ended = fork_gpu_ranks(NUM_RANKS, ending.reporting, **options)
    assert ended.totals["complete"] and not held_shards(options["output"])
    found = re.findall(rf"{ending.REPLAYED}(\d+){ending.LEFT}(\d+)", ended.stderr)
    assert [left for _, left in found] == ["0"] * NUM_RANKS
    assert sum(int(replayed) > 0 for replayed, _ in found) == DRAFT_RANK, (
        "of the target's ranks, not the draft's"
    )
    # It would wait for a graph that is still referred to, for ever.
    assert ending.DESTROYS not in ended.stderr


@pytest.mark.parametrize(("kind", "code"), [("fault", 1), ("usage", 2)])
def test_a_failure_of_one_rank_ends_all_with_its_code(options: dict[str, Any], kind: str, code: int) -> None:
    environment = {ending.KIND: kind}
    with started_gpu_ranks(NUM_RANKS, ending.failing, environment, **options) as (world, referee):
        wait_until(lambda: not world.is_running())
        for process in world.processes:
            process.join(SOON_S)
        assert [process.exitcode for process in world.processes] == [code] * NUM_RANKS
        assert ending.FAULT in world.words("stderr")[0]
        assert referee.failure is None or "has ended" in referee.failure


def test_a_stopped_run_ends_with_75_and_gives_its_shards_back(options: dict[str, Any]) -> None:
    output = options["output"]
    with started_gpu_ranks(NUM_RANKS, ending.reporting, **options) as (world, referee):
        wait_until(lambda: logged_rows(output, 0).count(b"\n") >= 1, world.is_running)
        begin = time.monotonic()
        for process in world.processes:
            os.kill(process.pid or 0, signal.SIGTERM)
        for process in world.processes:
            process.join(TIMEOUT_S)
        assert time.monotonic() - begin < SOON_S
        assert [process.exitcode for process in world.processes] == [75] * NUM_RANKS, world.words("stderr")
        assert referee.failure is None
    assert not held_shards(output)


@pytest.mark.parametrize("killed", [0, 1], ids=["rank 0", "a rank that others wait for in NCCL"])
def test_a_killed_rank_ends_the_others_and_the_same_command_goes_on(
    options: dict[str, Any], killed: int, tmp_path: Path
) -> None:
    """With the files of a run that nothing disturbed. Who waits in NCCL does not notice by itself."""
    alone = options | {"tp_size": 1, "device": "cpu", "output": tmp_path / "whole"}
    assert run_here(**alone).code == 0
    output = options["output"]
    with started_gpu_ranks(NUM_RANKS, ending.reporting, **options) as (world, _):
        wait_until(
            lambda: (
                logged_rows(output, 0).count(b"\n") >= 1
                and all(ending.REPLAYS in words for words in world.words("stderr")[:DRAFT_RANK])
            ),
            world.is_running,
        )
        assert world.is_running(), "too late: the run was over"
        ranks = [psutil.Process(process.pid) for process in world.processes]
        children = [child for rank in ranks for child in rank.children(recursive=True)]
        begin = time.monotonic()
        world.processes[killed].kill()
        for process in world.processes:
            process.join(SOON_S)
        assert time.monotonic() - begin < SOON_S
        codes = [-signal.SIGKILL if rank == killed else 1 for rank in range(NUM_RANKS)]
        assert [process.exitcode for process in world.processes] == codes, world.words("stderr")
        assert not psutil.wait_procs(children, SOON_S)[1]
        (log,) = (output / "logs").glob(f"*-rank-{1 - killed}.log")
        said = log.read_text()
        assert f"this replica ends: rank {killed} (target {killed + 1}/2): process " in said
    assert killed == 0 or not held_shards(output), "rank 0 gives its shards back"
    ended = fork_gpu_ranks(NUM_RANKS, **options)
    assert ended.totals["complete"] and not held_shards(output)
    assert shard_bytes(output) == shard_bytes(tmp_path / "whole")


def test_a_world_of_one_works_on_its_own_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    ended = fork_gpu_ranks(1, ending.on_another_gpu, **(options | {"tp_size": 1, "output": tmp_path / "one"}))
    assert ended.totals["complete"]
