"""Sums over the GPUs of a node, by their size, as the layers of a sharded model make them; on every rank.

    python -m specdist.job.ranks.launch --multi_gpu --num_processes N ... tests/gpu/first_sums.py FOLDER

Sums over 2, 4, ... of the ranks are in a graph, where a job has them: short ones through the peers' memory if
that is right here, others by NCCL. Both are shown where both can be had.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from specdist.models.passes.all_reduce import JOINED, MAX_BYTES_TIMES_RANKS, _checked
from specdist.models.passes.peer_memory import MAX_ROWS, WAYS, JoinedMemory, SymmetricMemory
from tests.gpu.first_device import Bench, say, table
from tests.gpu.first_steps import NUM_RANKS

# Of 1, 8, 32, 160, 512 and 2,048 tokens of a 70B model in bfloat16.
SIZES = tuple(16384 * num_tokens for num_tokens in (1, 8, 32, 160, 512, 2048))
NUM_SUMS, NUM_REPLAYS = 20, 5
DTYPE, WIDTH = torch.bfloat16, 8192


@dataclass(frozen=True, kw_only=True)
class Sum:
    """``seconds``: of the way that a job takes."""

    num_ranks: int
    num_bytes: int
    way: str
    seconds: float
    nccl_s: float


def main() -> int:
    """Returns the exit code."""
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    bench = Bench(is_fake=False, index=index)
    found = measure_sums(bench, world_size)
    if rank == 0:
        bench.write(Path(sys.argv[1]) / "sums.json", {"sums": [asdict(one) for one in found]})
    # A communicator's end waits for the graphs that hold its calls.
    gc.collect()
    dist.barrier()
    return 0


def measure_sums(bench: Bench, world_size: int, sizes: tuple[int, ...] = SIZES) -> list[Sum]:
    """On every rank of the world; the times are those of rank 0."""
    found = []
    for num_ranks in (number for number in NUM_RANKS if number <= world_size):
        # All ranks take part in making a group.
        group = dist.new_group(list(range(num_ranks)))
        if dist.get_rank() < num_ranks:
            found += sums_of(bench, group, sizes)
        dist.barrier()
    if dist.get_rank() == 0:
        say(table(found))
    return found


def sums_of(bench: Bench, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> list[Sum]:
    num_ranks = dist.get_world_size(group)
    max_bytes = MAX_BYTES_TIMES_RANKS // num_ranks
    memories = {}
    for name, new_memory in WAYS.items():
        memory, reason = _checked(max_bytes // DTYPE.itemsize, DTYPE, bench.device, group, new_memory)
        memories |= {} if memory is None else {name: memory}
        if dist.get_rank() == 0:
            say(f"{name} of {num_ranks}: {reason or f'right, up to {max_bytes} bytes'}")
    most = min(max_bytes // DTYPE.itemsize // WIDTH, MAX_ROWS) * WIDTH
    _, reason = _checked(most, DTYPE, bench.device, group, partial(JoinedMemory, WIDTH))
    if dist.get_rank() == 0:
        say(f"{JOINED}, {WIDTH} wide, of {num_ranks}: {reason or 'right'}")
    return [
        sum_of(bench, group, memories if num_bytes <= max_bytes else {}, num_bytes) for num_bytes in sizes
    ]


def sum_of(
    bench: Bench, group: dist.ProcessGroup, memories: Mapping[str, SymmetricMemory], num_bytes: int
) -> Sum:
    numbers = torch.ones(num_bytes // DTYPE.itemsize, dtype=DTYPE, device=bench.device)
    nccl_s = seconds_of(bench, lambda: dist.all_reduce(numbers, group=group))
    times = {name: seconds_of(bench, partial(memory.sum, numbers)) for name, memory in memories.items()}
    seconds, way = min((each, name) for name, each in (times | {"NCCL": nccl_s}).items())
    num_ranks = dist.get_world_size(group)
    return Sum(num_ranks=num_ranks, num_bytes=num_bytes, way=way, seconds=seconds, nccl_s=nccl_s)


def seconds_of(bench: Bench, add: Callable[[], object]) -> float:
    """As many on every rank: a number of repeats that depended on times would leave one waiting."""
    add()  # connects the ranks

    def add_often() -> None:
        for _ in range(NUM_SUMS):
            add()

    return bench.host_s(bench.recorded(add_often), NUM_REPLAYS) / NUM_SUMS


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
