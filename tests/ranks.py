"""Runs a module as the ranks of one world, each a real process, with a file rendezvous and a timeout."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from specdist.job.ranks.topology import Topology, init_deepspeed, join_world
from tests.forked import started_world

REPOSITORY = Path(__file__).parent.parent
TIMEOUT_S = 240


def run_ranks(module: str, num_ranks: int, *arguments: str) -> None:
    """Fail with the output of every rank if one of them fails, or has not ended in time."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1", "RENDEZVOUS": f"file://{folder}/rendezvous"}
        with started_world(num_ranks, run_module, module, *arguments, environment=environment) as world:
            code = world.end(TIMEOUT_S)
            spoken = zip(world.words("stdout"), world.words("stderr"), strict=True)
            words = "\n".join(f"--- rank {rank}\n{out}{error}" for rank, (out, error) in enumerate(spoken))
    assert code == 0, f"exit code {code}\n{words}"


def run_module(module: str, *arguments: str) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    """What a rank's module calls last. No rank leaves while another still communicates, and the interpreter's
    teardown, in which libraries' threads may abort, is left out, as in the job."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
