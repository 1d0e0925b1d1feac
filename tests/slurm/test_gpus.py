"""Replicas on one node never share a GPU, whatever Slurm tells them; each rank is near its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.job.killing import wait_until
from tests.ranks import REPOSITORY
from tests.slurm.cluster import NUM_GPUS, Cluster, missing

NODE = [f"00000000:{bus:02X}:00.0" for bus in range(4)]
# What it was launched with, a file for each launch.
LAUNCH = """#!/bin/sh
name=$(hostname)-${{SLURM_LOCALID:-0}}
echo "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES" >{folder}/$name.part
mv {folder}/$name.part {folder}/$name.launched
"""


def write_nvidia_smi(folder: Path, bus_ids: Sequence[str]) -> Path:
    """A folder for the PATH, in which nvidia-smi knows these GPUs."""
    listed, queried = [], []
    for index, bus_id in enumerate(bus_ids):
        listed.append(f"GPU {index}: Some GPU (UUID: GPU-{index}aaa-bbb)")
        queried.append(f"{index}, GPU-{index}aaa-bbb, {bus_id}")
    script = "\n".join(
        [
            "#!/bin/sh",
            'if [ "$1" = -L ]; then cat <<EOF',
            *listed,
            "EOF",
            "else cat <<EOF",
            *queried,
            "EOF",
            "fi",
        ]
    )
    return _script(folder, "nvidia-smi", script + "\n")


def write_launch(folder: Path) -> Path:
    """A program in place of the Python that would launch the ranks."""
    return _script(folder, "launch", LAUNCH.format(folder=folder)) / "launch"


def launches(folder: Path) -> dict[str, str]:
    """``CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES`` by node and replica."""
    return {path.stem: path.read_text().strip() for path in folder.glob("*.launched")}


def _script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return folder


def launch(folder: Path, local_id: int, num_gpus: int, **told: str) -> tuple[int, str, str]:
    """Exit code of slurm/replica.sh, the GPUs that it launches on, and stderr. ``told``: by Slurm."""
    untold = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CUDA"))}
    ended = subprocess.run(
        ["bash", "slurm/replica.sh", "some.yaml"],
        cwd=REPOSITORY,
        env={
            **untold, "PATH": f"{folder}:{os.environ['PATH']}", "SPECDIST_PYTHON": str(write_launch(folder)),
            "ACCELERATE_CONFIG": "some", "GPUS_PER_REPLICA": str(num_gpus), "SLURM_LOCALID": str(local_id),
            **told,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    (found,) = launches(folder).values() or [""]
    return ended.returncode, found, ended.stderr


@pytest.mark.parametrize(
    ("told", "num_seen", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "5,1,7,3"}, 8, "7,3"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,MIG-c,MIG-GPU-d/1/0"}, 4, "MIG-c,MIG-GPU-d/1/0"),
        # Wins over what the node has: it is how a user takes GPUs out.
        ({"CUDA_VISIBLE_DEVICES": "3,2,1,0", "SLURM_STEP_GPUS": "0,1,2,3"}, 4, "1,0"),
        ({"SLURM_STEP_GPUS": "4,5,6,7", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}, 8, "6,7"),
        # A cgroup hides the others, and numbers those that are left anew.
        ({"SLURM_STEP_GPUS": "4,5,6,7"}, 4, "2,3"),
        ({}, 4, "2,3"),
        ({}, 0, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, "NoDevFiles"),
    ],
)
def test_the_second_replica_takes_the_second_half(
    tmp_path: Path, told: dict[str, str], num_seen: int, expected: str
) -> None:
    write_nvidia_smi(tmp_path, NODE * 2 if num_seen == 8 else NODE[:num_seen])
    code, gpus, stderr = launch(tmp_path, 1, 2, **told)
    assert (code, gpus) == (0, f"PCI_BUS_ID {expected}".strip()), stderr


def test_too_few_gpus_are_a_message(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, NODE[:3])
    code, gpus, stderr = launch(tmp_path, 1, 2, SLURM_STEP_GPUS="0,1,2")
    assert (code, gpus) == (2, "")
    assert stderr == (
        "error: replica 1 of this node needs 2 GPUs, but of the job's (0,1,2) only 1 remain: "
        "raise --gpus-per-node, or lower REPLICAS or GPUS_PER_REPLICA\n"
    )


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_replicas_of_a_job_on_two_nodes_share_no_gpu() -> None:
    """Of GPUs that are Slurm's, and of such that it knows nothing of."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, Cluster(Path(name), 2) as slurm:
        for num_asked in (NUM_GPUS, 0):
            folder = Path(name) / f"asked-{num_asked}"
            write_nvidia_smi(folder, NODE)
            environment = {
                "REPLICAS": "2", "GPUS_PER_REPLICA": "2", "SPECDIST_PYTHON": str(write_launch(folder)),
                "PATH": f"{folder}:{slurm.environment['PATH']}",
            }  # fmt: skip
            slurm.submit(
                REPOSITORY, environment, "--nodes=2", f"--gpus-per-node={num_asked}", "--cpus-per-task=2",
                "--no-requeue", f"--output={folder}/log", "slurm/run.sh", "some.yaml",
            )  # fmt: skip
            wait_until(lambda: not slurm.states())
            assert launches(folder) == {
                f"{node}-{replica}": f"PCI_BUS_ID {gpus}"
                for node in ("n0", "n1")
                for replica, gpus in enumerate(("0,1", "2,3"))
            }, (folder / "log").read_text()
