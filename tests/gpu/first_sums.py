"""Sums over the GPUs of a node, by their size, as the layers of a sharded model make them; on every rank.

    python -m specdist.job.ranks.launch --multi_gpu --num_processes N ... tests/gpu/first_sums.py FOLDER

Sums over 2, 4, ... of the ranks are in a graph, where a job has them. Every way that is right here is timed
as a job does before it chooses: sums alone, and those with a residual and a norm after them.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from specdist.models.passes import all_reduce
from specdist.models.passes.all_reduce import BACKEND, Times, choose_sums
from tests.gpu.first_device import Bench, say, table
from tests.gpu.first_steps import NUM_RANKS

# A 70B model in bfloat16; sums of 512 and 2,048 tokens are NCCL's.
DTYPE, WIDTH = torch.bfloat16, 8192
LONG_SIZES = tuple(16384 * num_tokens for num_tokens in (512, 2048))


@dataclass(frozen=True, kw_only=True)
class Sum:
    """``seconds``: of the way that a job takes; ``ways``: of each that was timed."""

    num_ranks: int
    num_bytes: int
    way: str
    seconds: float
    ways: dict[str, float]


def main() -> int:
    """Returns the exit code."""
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    index = int(os.environ["LOCAL_RANK"])
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, format="%(message)s")
    torch.cuda.set_device(index)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    bench, alone, followed = Bench(is_fake=False, index=index), list[Sum](), list[Sum]()
    for num_ranks in (number for number in NUM_RANKS if number <= world_size):
        # All ranks take part in making a group.
        group = dist.new_group(list(range(num_ranks)))
        if rank < num_ranks:
            for found, times in zip((alone, followed), times_of(bench.device, group), strict=False):
                found += [sum_of(num_ranks, size, seconds) for size, seconds in times.items()]
        dist.barrier()
    if rank == 0:
        say(f"sums:\n{table(alone)}\nwith a residual and a norm after them:\n{table(followed)}")
        sums = {"sums": [asdict(one) for one in alone], "followed": [asdict(one) for one in followed]}
        bench.write(Path(sys.argv[1]) / "sums.json", sums)
    # A communicator's end waits for the graphs that hold its calls.
    gc.collect()
    dist.barrier()
    return 0


def times_of(device: torch.device, group: dist.ProcessGroup) -> list[Times]:
    """Of sums alone, and of those with a norm after them, where there are several ways; the log says which
    are right, and what a job chooses."""
    own, found = all_reduce._slowest, list[Times]()

    def kept(*args: Any) -> Times:
        found.append(own(*args))
        return found[-1]

    all_reduce._slowest = kept  # type: ignore[assignment]
    choose_sums(nn.Module(), dtype=DTYPE, device=device, group=group, width=WIDTH)
    all_reduce._slowest = own
    by_nccl: dict[int, dict[str, float]] = {}
    for size in LONG_SIZES:
        numbers = torch.ones(size // DTYPE.itemsize, dtype=DTYPE, device=device)
        seconds = all_reduce._recorded_s(device, group, lambda: dist.all_reduce(numbers, group=group))  # noqa: B023
        by_nccl[size] = {BACKEND: seconds}
    return [by_nccl | dict(found[0]), *found[1:]]


def sum_of(num_ranks: int, num_bytes: int, ways: Any) -> Sum:
    seconds, way = min((each, name) for name, each in ways.items())
    return Sum(num_ranks=num_ranks, num_bytes=num_bytes, way=way, seconds=seconds, ways=ways)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
