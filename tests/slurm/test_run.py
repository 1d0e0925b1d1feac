"""slurm/run.sh on a private Slurm: whatever the cluster does, every row is there once and no byte differs."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdist.data.leases.leases import shard_name
from specdist.data.leases.membership import Membership
from tests.job.launching import read_output, run_here, shard_bytes
from tests.job.pair import Pair, some_texts, write_arrow
from tests.ranks import REPOSITORY
from tests.slurm.cluster import Cluster, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
TIMEOUT_S = 600.0
NUM_ROWS, NUM_SHARDS = 36, 9
# Shards that are free at first, and from one event to the next.
NUM_FREE = 3
SETTINGS = {
    "SPECDIST_PYTHON": sys.executable,
    "REPLICAS": "1",
    "GPUS_PER_REPLICA": "1",
    "ACCELERATE_CONFIG": "jobs/accelerate/cpu.yaml",
    "OMP_NUM_THREADS": "1",
}


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
        "max_new_tokens": 24,
        "lease_timeout": 3,
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


class OtherReplica:
    """Holds all shards but the first few, as a replica at work elsewhere would, and gives back some at a
    time: a run does not end before the test has done to it what it means to."""

    def __init__(self, output: Path, undisturbed: Path) -> None:
        output.mkdir()
        shutil.copy(undisturbed / "manifest.json", output)
        self._membership = Membership(output, silent_after_s=TIMEOUT_S)
        self._membership.join()
        taken = [self._membership.leases.take(shard_name(shard), None) for shard in range(NUM_SHARDS)]
        self._held = [lease for lease in taken if lease is not None]
        assert len(self._held) == NUM_SHARDS
        self.give_back()

    def give_back(self, num: int = NUM_FREE) -> None:
        """So many of those that it still holds."""
        for lease in self._held[:num]:
            self._membership.leases.release(lease)
        del self._held[:num]

    def leave(self) -> None:
        """Give back the others, too."""
        self.give_back(NUM_SHARDS)
        self._membership.leave()


@pytest.fixture
def other(run: tuple[dict[str, Any], Path], tmp_path: Path) -> Iterator[OtherReplica]:
    """In the folder of the test's run."""
    replica = OtherReplica(tmp_path / "run", run[1])
    yield replica
    replica.leave()


def configured(tmp_path: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    output = tmp_path / "run"
    config = tmp_path / "config.yaml"
    # As the undisturbed run: tokens are then the same, wherever blocks end.
    config.write_text(
        yaml.safe_dump({"policy": "fixed", "overlap": "synchronous", **options, "output": str(output)})
    )
    return config, output


def num_done(output: Path) -> int:
    return len(list(output.glob("shards/*.json")))


def num_at_work(output: Path) -> int:
    """Replicas that have loaded their models."""
    return sum("shards to do" in path.read_text() for path in output.glob("logs/*"))


def check_whole(output: Path, undisturbed: Path) -> None:
    assert shard_bytes(output) == shard_bytes(undisturbed)
    assert Counter(read_output(output)["row_id"].to_pylist()) == dict.fromkeys(range(NUM_ROWS), 1)


def test_an_array_through_everything_that_a_cluster_does(
    cluster: Cluster, run: tuple[dict[str, Any], Path], other: OtherReplica, tmp_path: Path
) -> None:
    """Three replicas on nodes of their own; one is asked to stop, and one killed. The first is the last task,
    whose id is that of the whole array: the others are neither asked to stop nor requeued with it."""
    options, undisturbed = run
    config, output = configured(tmp_path, options)
    job = cluster.submit(
        REPOSITORY, SETTINGS, "--array=0-2", "--gpus-per-node=1", "--cpus-per-task=64",
        f"--output={tmp_path}/log-%a", "slurm/run.sh", str(config),
    )  # fmt: skip
    wait_until(lambda: num_at_work(output) == 3 and num_done(output) >= 1, "all at work")
    assert cluster.ask("squeue", "-h", "-o", "%j").split() == ["specdist"] * 3, "options of run.sh were read"
    lines = map(str.split, cluster.ask("squeue", "-h", "-o", "%A %K").splitlines())
    (last,) = [task for own, task in lines if own == job]
    first, second = {"0", "1", "2"} - {last}
    logs = {task: tmp_path / f"log-{task}" for task in "012"}
    cluster.ask("scancel", "--signal=USR1", "--batch", f"{job}_{last}")  # as before a time limit
    other.give_back()
    wait_until(lambda: num_done(output) >= NUM_FREE + 1, "the others go on")
    wait_until(
        lambda: cluster.states()[f"{job}_{last}"] == "PENDING", "the task that was asked to stop is requeued"
    )
    asked = [task for task, path in logs.items() if "SIGTERM: stopping" in path.read_text()]
    assert asked == [last] and "Killed" not in logs[last].read_text()
    assert {cluster.states()[f"{job}_{task}"] for task in (first, second)} == {"RUNNING"}
    cluster.ask("scancel", "--signal=KILL", f"{job}_{first}")
    other.leave()
    wait_until(lambda: num_done(output) >= NUM_SHARDS, "the run is complete")
    wait_until(lambda: not cluster.states(), "the end of all jobs")
    check_whole(output, undisturbed)
    assert logs[last].read_text().count("importing torch") >= 2, "it was requeued, and started again"
