"""The ranks of test_all_reduce.py: a group whose sums go through a stand-in for peers' memory, on gloo.

Every way in which the stand-in is wrong, or fails on one rank alone, must lead both ranks to the same choice.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_process_group_store

from specdist.models.passes import all_reduce
from specdist.models.passes.all_reduce import use_peer_memory
from tests.ranks import join, leave

CPU = torch.device("cpu")
# So that the bound on a message is 1,024 numbers of float32.
all_reduce.MAX_BYTES_TIMES_RANKS = 8192
all_reduce.MEETING_TIMEOUT = timedelta(seconds=5)
WIDTH = 64


class StandIn:
    """Gathers all parts and adds them in the order of the ranks, as torch's kernel does."""

    fault = ""
    num_sums = num_meetings = 0

    def __init__(
        self, num_numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._fail_at("allocation")
        self._buffer_N = torch.zeros(num_numbers, dtype=dtype, device=device)
        self._group = group
        self._is_connected = False

    def connect(self) -> None:
        # As torch's, which waits there for what the others have to tell.
        StandIn.num_meetings += 1
        self._fail_at("rendezvous")
        store = _get_process_group_store(self._group)
        store.set(f"{StandIn.num_meetings} {dist.get_rank()}", "here")
        try:
            store.wait([f"{StandIn.num_meetings} {rank}" for rank in range(2)])
        except RuntimeError as error:  # that of a file; a launcher's store raises this one itself
            raise dist.DistStoreError(str(error)) from None
        self._is_connected = True

    def sum(self, numbers_N: Tensor) -> Tensor:
        assert self._is_connected and len(numbers_N) <= len(self._buffer_N)
        assert numbers_N.is_contiguous() and numbers_N.nbytes % 16 == 0
        StandIn.num_sums += 1
        parts = [torch.empty_like(numbers_N) for _ in range(2)]
        dist.all_gather(parts, numbers_N, group=self._group)
        self._fail_at("kernel")
        total_N = parts[0] + parts[1]
        if self.fault == "sum":
            total_N = parts[0]
        if self.fault == "last bit" and dist.get_rank(self._group) == 1:
            total_N[-1] = torch.nextafter(total_N[-1], torch.tensor(torch.inf))
        if self.fault == "second message" and StandIn.num_sums % 2 == 0:
            total_N = total_N + parts[1]
        return total_N

    def _fail_at(self, step: str) -> None:
        if self.fault == f"{step} on rank 1" and dist.get_rank() == 1:
            raise RuntimeError(f"no {step} here")


def sums_of(fault: str, group: dist.ProcessGroup) -> tuple[nn.Module, bool, str]:
    """The layers, whether peers' memory is used, and the one line of the log."""
    torch.manual_seed(0)
    whole = [nn.Linear(2 * WIDTH, WIDTH, bias=bias) for bias in (True, False)]
    model = nn.ModuleList([LinearAllreduce(layer, group) for layer in whole])
    StandIn.fault, StandIn.num_sums = fault, 0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    all_reduce.logger.addHandler(handler)
    all_reduce.logger.setLevel(logging.INFO)
    used = use_peer_memory(model, dtype=torch.float32, device=CPU, group=group, new_memory=StandIn)
    all_reduce.logger.removeHandler(handler)
    (line,) = said
    return model, used, line


topology = join(tp_size=2)
group = dist.new_group([0, 1])
with torch.inference_mode():
    for fault, reason in (
        ("", ""),
        ("sum", "rank 0: sums of 16 numbers differ from all-reduce by"),
        ("last bit", "rank 1: sums of 16 numbers are not the same on all ranks"),
        ("second message", "rank 0: sums of 16 numbers differ from all-reduce by"),
        ("allocation on rank 1", "rank 1: RuntimeError: no allocation here"),
        ("rendezvous on rank 1", "rank 1: RuntimeError: no rendezvous here"),
        ("kernel on rank 1", "rank 1: RuntimeError: no kernel here"),
    ):
        begin = time.monotonic()
        model, used, line = sums_of(fault, group)
        assert used == (not fault) and time.monotonic() - begin < 60, (fault, line)
        assert (
            (reason in line and "not used: peers' memory" in line)
            if fault
            else "2 layers up to 4 KiB" in line
        ), line
        for layer in model:
            # Summed by peers' memory; one number too many for it.
            for num_rows, num_sums in ((16, 1), (17, 0)):
                inputs = torch.randn(
                    1, num_rows, WIDTH, generator=torch.Generator().manual_seed(topology.rank)
                )
                StandIn.num_sums = 0
                found = layer(inputs)
                assert StandIn.num_sums == (num_sums if used else 0), (fault, num_rows)
                assert torch.equal(found, LinearAllreduce.forward(layer, inputs)), (fault, num_rows)
leave()
