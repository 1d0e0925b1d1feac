"""Ranks with fake GPUs that run out of memory or disagree: nothing hangs, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from specdist.job.ranks.restart import NUM_RESTARTS
from tests.gpu import breaking
from tests.gpu.generating import Main, Refereed, fork_gpu_ranks
from tests.job.launching import read_output, run_here, shard_bytes

pytestmark = pytest.mark.ranks

NUM_RANKS = 3


@pytest.fixture(scope="module")
def undisturbed(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process on a CPU."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(**options, device="cpu", output=output).code == 0
    return output


def broken(main: Main, ranks: str, moment: int, **options: Any) -> Refereed:
    environment = {breaking.RANKS: ranks, breaking.MOMENT: str(moment)}
    return fork_gpu_ranks(NUM_RANKS, main, environment, **options, tp_size=2)


def test_a_draft_rank_that_joins_a_broadcast_on_the_host_is_reported_with_both_stacks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """On GPUs all ranks would hang: the target's ranks broadcast over NCCL, and the draft would over gloo."""
    ended = broken(breaking.joins_on_the_host, "2", 0, **options, output=tmp_path / "run")
    assert ended.code == 1
    failure = ended.referee.failure
    assert failure is not None and failure.startswith("collectives do not match (backend, shape): ")
    assert "models/sharding/cutting.py:" in failure and "tests/gpu/breaking.py:" in failure
    assert "broadcast on NCCL" in failure and "broadcast on gloo" in failure


@pytest.mark.parametrize(
    ("main", "ranks", "moment"),
    [
        pytest.param(breaking.out_of_memory_in_a_pass, "1", 4, id="in a pass of one rank"),
        pytest.param(breaking.out_of_memory_in_a_pass, "01", 4, id="in a pass of all ranks"),
        pytest.param(breaking.out_of_memory_before_a_capture, "1", 2, id="before a capture of one rank"),
        pytest.param(breaking.out_of_memory_in_a_capture, "1", 2, id="in a capture of one rank"),
    ],
)
def test_ranks_without_memory_start_over_with_half_the_batch(
    options: dict[str, Any], undisturbed: Path, main: Main, ranks: str, moment: int, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    ended = broken(main, ranks, moment, **options, output=output)
    assert ended.code == breaking.STARTS_OVER, ended.stderr
    assert ended.referee.failure is None, ended.referee.failure
    culprit = ended.stderr.split("this replica ends: rank ")[1]
    assert culprit[0] in ranks and "OutOfMemoryError: CUDA out of memory." in culprit
    # The ranks' own launcher has a store through which they meet again.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    again = {NUM_RESTARTS: "1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = fork_gpu_ranks(NUM_RANKS, environment=again, **options, tp_size=2, output=output)
    assert ended.totals["num_rows"] == options["limit"]
    assert "out of memory: continuing with at most " in ended.stderr
    assert json.loads((output / "manifest.json").read_text())["info"]["num_batch_halvings"] == 1
    expected = read_output(undisturbed)["completion_ids"].to_pylist()
    assert read_output(output)["completion_ids"].to_pylist() == expected


@pytest.mark.parametrize("main", [breaking.no_capture, breaking.wrong_replay])
def test_a_rank_that_cannot_record_or_replay_makes_all_ranks_give_graphs_up(
    options: dict[str, Any], undisturbed: Path, main: Main, tmp_path: Path
) -> None:
    """Captured and other collectives of a group must not mix (NCCL, "Using NCCL with CUDA Graphs")."""
    ended = broken(main, "1", 2, **options, output=tmp_path / "run")
    assert ended.referee.failure is None, ended.referee.failure
    assert ended.totals["num_out_of_memory"] == 0
    assert ended.stderr.count("passes run without graphs from now on: ") == 2
    assert ended.stderr.count("another rank of the model cannot record it, or its replay differs") == 1
    assert shard_bytes(tmp_path / "run") == shard_bytes(undisturbed)
