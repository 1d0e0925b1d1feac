"""slurm/run.sh on a private Slurm: whatever the cluster does, every row is there once and no byte differs."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.job.launching import read_output, run_here, shard_bytes
from tests.job.pair import Pair, build_pair, some_texts, write_arrow
from tests.ranks import REPOSITORY
from tests.slurm.cluster import Cluster, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
TIMEOUT_S = 600.0
NUM_ROWS, NUM_SHARDS = 160, 16
SETTINGS = {
    "SPECDIST_PYTHON": sys.executable,
    "REPLICAS": "1",
    "GPUS_PER_REPLICA": "1",
    "ACCELERATE_CONFIG": "jobs/accelerate/cpu.yaml",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def run(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The options of a run, and the folder of one that nothing disturbed."""
    folder = tmp_path_factory.mktemp("run")
    texts = some_texts(NUM_ROWS)
    options = {
        "prompts": str(write_arrow(folder / "prompts.arrow", {"prompt": texts})),
        "target": str(pair.target),
        "draft": str(pair.draft),
        "device": "cpu",
        "rows_per_shard": NUM_ROWS // NUM_SHARDS,
        "max_num_seqs": 1,
        "max_new_tokens": 60,
        "claim_timeout": 3,
    }
    assert run_here(**options, output=folder / "undisturbed").code == 0
    return options, folder / "undisturbed"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Not in a folder of pytest's, which are closed to all others: munge refuses those.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder), 3) as found:
        yield found


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


def configured(tmp_path: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    output = tmp_path / "run"
    config = tmp_path / "config.yaml"
    # As the undisturbed run: tokens are then the same, wherever blocks end.
    config.write_text(
        yaml.safe_dump({"policy": "fixed", "overlap": "none", **options, "output": str(output)})
    )
    return config, output


def num_done(output: Path) -> int:
    return len(list(output.glob("shards/*.json")))


def num_at_work(output: Path) -> int:
    """Replicas that have loaded their models."""
    return sum("shards to do" in path.read_text() for path in output.glob("logs/*"))


def hosts(output: Path) -> set[str]:
    """Where replicas have worked."""
    return {path.name.split("-")[0] for path in (output / "logs").iterdir()}


def leads(output: Path) -> list[psutil.Process]:
    """The processes that generate into this folder, on whatever node."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "jobs/generate.py" in line and str(output.parent) in line and "accelerate" not in line:
            found.append(process)
    return found


def check_whole(output: Path, undisturbed: Path) -> None:
    assert shard_bytes(output) == shard_bytes(undisturbed)
    assert Counter(read_output(output)["row_id"].to_pylist()) == dict.fromkeys(range(NUM_ROWS), 1)


def test_an_array_through_everything_that_a_cluster_does(
    cluster: Cluster, run: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Four replicas over 16 shards; one is asked to stop, one requeued, one killed, and a node goes down."""
    options, undisturbed = run
    config, output = configured(tmp_path, options)
    job = cluster.submit(
        REPOSITORY, SETTINGS, "--array=0-3", "--gpus-per-node=1", "--cpus-per-task=16",
        f"--output={tmp_path}/log-%a", "slurm/run.sh", str(config),
    )  # fmt: skip
    wait_until(lambda: num_at_work(output) == 4 and num_done(output) >= 1, "all at work")
    assert cluster.ask("squeue", "-h", "-o", "%j").split() == ["specdist"] * 4, "options of run.sh were read"
    cluster.ask("scancel", "--signal=USR1", "--batch", f"{job}_0")
    cluster.ask("scontrol", "requeue", f"{job}_1")
    wait_until(lambda: num_done(output) >= 3, "the others go on")
    leads(output)[0].kill()
    wait_until(lambda: num_done(output) >= 5, "the others still go on")
    cluster.ask("scontrol", "update", "nodename=n0", "state=down", "reason=test")
    wait_until(lambda: not cluster.states(), "the end of all jobs")
    check_whole(output, undisturbed)
    stopped = (tmp_path / "log-0").read_text()
    assert "SIGTERM: stopping after this round" in stopped and "Killed" not in stopped
    assert stopped.count("shards to do") == 2, "it was requeued, and went on"


def test_replicas_on_several_nodes_and_several_on_one(
    cluster: Cluster, run: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """One job on two nodes, of which one loses its power: two replicas on each, and then on another pair."""
    options, undisturbed = run
    config, output = configured(tmp_path, options)
    cluster.submit(
        REPOSITORY, {**SETTINGS, "REPLICAS": "2"}, "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=16",
        f"--output={tmp_path}/log", "slurm/run.sh", str(config),
    )  # fmt: skip
    wait_until(lambda: num_at_work(output) == 4 and num_done(output) >= 1, "all at work")
    assert hosts(output) == {"n0", "n1"}
    cluster.power_off("n1")
    wait_until(lambda: num_done(output) >= NUM_SHARDS, "the run is complete")
    wait_until(lambda: not cluster.states(), "the end of the job")
    check_whole(output, undisturbed)
