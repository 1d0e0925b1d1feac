"""Ranks of a replica without a launcher: nobody but the ranks themselves notices when one of them dies."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from tests.job import forked
from tests.job.launching import arguments


@contextlib.contextmanager
def forked_ranks(num_ranks: int, **options: Any) -> Iterator[list[BaseProcess]]:
    """A process per rank, forked from one that has imported the libraries; those that are left are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([forked.__name__])
    processes: list[BaseProcess] = []
    try:
        for rank in range(num_ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(
                target=forked.run_rank_quietly, args=(environment, arguments(**options))
            )
            process.start()
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
