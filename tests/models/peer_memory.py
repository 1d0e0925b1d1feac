"""The ranks of test_all_reduce.py: a group whose sums go through a stand-in for peers' memory, on gloo.

Every way in which the stand-in is wrong, or fails on one rank alone, must lead both ranks to the same choice,
and so must times that differ between them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import LinearAllreduce
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_process_group_store

from specdist.models.passes import all_reduce
from specdist.models.passes.all_reduce import BACKEND, Choice, choose_sums
from specdist.models.passes.peer_memory import MULTIMEM, ONE_SHOT, check_links
from tests.ranks import join, leave

CPU = torch.device("cpu")
# So that the bound on a message is 1,024 numbers of float32.
all_reduce.MAX_BYTES_TIMES_RANKS = 8192
all_reduce.MEASURED_BYTES = (1024, 2048, 4096, 8192)
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


def never(_: Callable[[], object]) -> float:
    raise AssertionError("a frozen choice is not measured")


def measured(backend_s: Sequence[float], one_shot_s: Sequence[float]) -> Callable[[Any], float]:
    """Seconds of each size in turn, as they are wanted; the sums are made, too."""
    times = iter([each for pair in zip(backend_s, one_shot_s, strict=True) for each in pair])

    def measure(add: Callable[[], object]) -> float:
        add()
        return next(times)

    return measure


def sums_of(
    fault: str,
    group: dist.ProcessGroup,
    measure: Callable[[Any], float] | None = None,
    frozen: Choice | None = None,
    check: Callable[..., object] = lambda *_: None,
) -> tuple[nn.Module, Choice, str]:
    """The layers, the choice of sums, and the one line of the log."""
    torch.manual_seed(0)
    whole = [nn.Linear(2 * WIDTH, WIDTH, bias=bias) for bias in (True, False)]
    model = nn.ModuleList([LinearAllreduce(layer, group) for layer in whole])
    StandIn.fault, StandIn.num_sums = fault, 0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    all_reduce.logger.addHandler(handler)
    all_reduce.logger.setLevel(logging.INFO)
    choice = choose_sums(
        model,
        dtype=torch.float32,
        device=CPU,
        group=group,
        frozen=frozen,
        ways={ONE_SHOT: StandIn},
        check=check,
        measure=measure or measured((2, 2, 2), (1, 1, 1)),
    )
    all_reduce.logger.removeHandler(handler)
    (line,) = said
    return model, choice, line


def check_sums(model: nn.Module, expected: dict[int, int], about: object) -> None:
    """``expected``: of so many rows of 64 numbers, sums through peers' memory; all are right."""
    for layer in model:
        for num_rows, num_sums in expected.items():
            inputs = torch.randn(1, num_rows, WIDTH, generator=torch.Generator().manual_seed(topology.rank))
            StandIn.num_sums = 0
            found = layer(inputs)
            assert StandIn.num_sums == num_sums, (about, num_rows)
            assert torch.equal(found, LinearAllreduce.forward(layer, inputs)), (about, num_rows)


def check_measuring() -> None:
    """What cannot be recorded on one rank is replayed on none: there each waits for the other."""
    torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: dist.barrier(group))
    torch.cuda.graph, torch.cuda.synchronize = lambda *_, **__: nullcontext(), lambda _: None

    def add() -> None:
        if topology.rank == failing:
            raise RuntimeError("no memory for it")

    for failing in (1, None):
        assert (all_reduce._recorded_s(CPU, group, add) == math.inf) == (failing == 1)


def check_without_links() -> None:
    """The second GPU has links to none, or torch does not know of links: no way is begun."""

    def ask(*_: object) -> None:
        check_links(torch.device("cuda", topology.rank), group)

    for matrix, reason in (([[0, 18], [0, 0]], "no NVLink to the GPU of rank 0"), ([[0, 18]], "IndexError")):
        torch._C._distributed_c10d._detect_dma_connectivity = lambda *_: SimpleNamespace(matrix=matrix)  # noqa: B023
        begun, (_, choice, line) = StandIn.num_meetings, sums_of("", group, never, check=ask)
        assert (choice, StandIn.num_meetings) == ([], begun)
        assert f"all-reduce; not used: memory of peers: rank 1: {reason}" in line, line


topology = join(tp_size=2)
group = dist.new_group([0, 1])
check_measuring()
check_without_links()
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
        model, choice, line = sums_of(fault, group)
        assert choice == ([] if fault else [(4096, ONE_SHOT)]), (fault, choice)
        assert time.monotonic() - begin < 60, (fault, line)
        said = (
            f"all-reduce; not used: one-shot: {reason}" if fault else "one-shot up to 4 KiB; above all-reduce"
        )
        assert said in line, line
        # One number too many for it, the second.
        check_sums(model, {16: int(not fault), 17: 0}, fault)
    # The slowest rank decides: the second finds the largest message slow through the peers' memory, and the
    # first one the middle.
    own_s = ((1, 9, 1), (1, 1, 9))[topology.rank]
    model, choice, line = sums_of("", group, measured((2, 2, 2), own_s))
    assert choice == [(1024, ONE_SHOT), (4096, BACKEND)], choice
    check_sums(model, {4: 1, 5: 0, 16: 0}, choice)
    # A run that goes on keeps its choice, but for ways that are not to be had here.
    model, choice, line = sums_of("", group, never, [[2048, ONE_SHOT], [4096, MULTIMEM]])
    assert choice == [(2048, ONE_SHOT), (4096, BACKEND)], choice
    check_sums(model, {8: 1, 16: 0}, choice)
leave()
