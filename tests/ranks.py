"""Runs a module as the ranks of one world, each a real process, with a file rendezvous and a timeout."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from specdist.job.topology import Topology, init_deepspeed, join_world

REPOSITORY = Path(__file__).parent.parent
TIMEOUT_S = 240


def run_ranks(module: str, num_ranks: int, *arguments: str) -> None:
    """Fail with the output of every rank if one of them fails, or has not ended in time."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(num_ranks),
            "RENDEZVOUS": f"file://{folder}/rendezvous",
            "DS_ACCELERATOR": "cpu",
        }
        processes = []
        for rank in range(num_ranks):
            output = Path(folder, f"rank{rank}.log").open("w")  # noqa: SIM115
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=REPOSITORY,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if all(code is not None for code in codes) or any(codes):
                break
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted(Path(folder).glob("*.log"))
        )
        assert codes == [0] * num_ranks, f"exit codes {codes}\n{logs}"


def join(tp_size: int) -> Topology:
    """What a rank's module calls first."""
    world_size = int(os.environ["WORLD_SIZE"])
    topology = Topology(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        tp_size=tp_size,
        uses_draft=world_size > tp_size,
        device=torch.device("cpu"),
    )
    join_world(topology, os.environ["RENDEZVOUS"])
    init_deepspeed(topology)
    return topology


def leave() -> None:
    """What a rank's module calls last. Nobody hangs up while another is still talking, and the interpreter's
    teardown, in which libraries' threads may abort, is left out, as in the job."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
