"""The ranks of test_all_reduce.py whose sums are joined with the norms after them: the kernel, interpreted,
on both at the same time, over memory that the processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder

from specdist.kernels import layers, shared_rows
from specdist.models.passes import all_reduce, peer_memory
from specdist.models.passes.all_reduce import SUMMING, choose_sums
from specdist.models.passes.fusing import FusedLayers
from specdist.models.passes.peer_memory import JOINED, NORM, SHARED_ROWS
from tests.kernels.test_fusing import logits_of, paged_model
from tests.ranks import join, leave

CPU, WIDTH, NUM_LAYERS = torch.device("cpu"), 64, 3
# A program has several blocks of rows.
shared_rows.MAX_PROGRAMS = 2
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
# Of two ranks: 16 rows of float32, and 32 that are shared out.
all_reduce.MAX_BYTES_TIMES_RANKS = all_reduce.MAX_BYTES = 8192
all_reduce.MEASURED_BYTES = (1024, 2048, 4096, 8192)
peer_memory.MOST_WAITS = 10_000  # some seconds
FOLDER = Path(os.environ["RENDEZVOUS"].removeprefix("file://")).parent
own_atomic = InterpreterBuilder.create_atomic_rmw
late_s, num_atomics = 0.0, 0


def atomic(*args: Any) -> Any:
    """Between polls others have the processor. A rank that is late reads after its peer has gone on."""
    global num_atomics
    num_atomics += 1
    found = own_atomic(*args)
    time.sleep(0.0005 + late_s)
    return found


def empty(num_numbers: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    global num_memories
    assert device == CPU
    num_memories += 1
    return shared(dist.get_rank(), num_numbers, dtype)


def shared(rank: int, num_numbers: int, dtype: torch.dtype) -> Tensor:
    path = str(FOLDER / f"{num_memories} {rank}")
    held.append(torch.from_file(path, shared=True, size=num_numbers, dtype=dtype))
    return held[-1]


def rendezvous(own: Tensor, group: dist.ProcessGroup) -> Any:
    dist.barrier(group)
    # Older versions of torch have another that knows no offsets.
    reach = lambda rank, shape, dtype: shared(rank, shape[0], dtype)  # noqa: E731
    return SimpleNamespace(get_remote_tensor=reach, get_buffer=None)


def alone(own: Tensor, group: dist.ProcessGroup) -> Any:
    return SimpleNamespace(get_buffer=lambda rank, shape, dtype: own)


class Term(nn.Module):
    """A rank's share of a layer that is cut, and perhaps more than its sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.sum_over_ranks, self.bias = whole.weight, None, 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        total = nn.functional.linear(inputs, self.weight * (0.25, 0.75)[dist.get_rank()])
        if self.sum_over_ranks is not None:
            total = self.sum_over_ranks(total)
        else:
            dist.all_reduce(total, group=group)
        return total + self.bias if self.bias else total


def measured(*seconds: float) -> Callable[[Any], float]:
    times = iter(seconds)

    def measure(add: Callable[[], object]) -> float:
        add()
        return next(times)

    return measure


def check_kernel(kind: str, width: int, rows: Sequence[int], dtype: torch.dtype, **more: Any) -> None:
    """Many turns, of few rows and of more, while a rank is late: the same bits as of the parts, on all ranks,
    which are near float64; a number that is none spoils its row alone. ``more``: of a norm before."""
    global late_s
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    memory: Any = peer_memory.JOINED_WAYS[kind](width, max(rows) * width, dtype, CPU, group)
    memory.connect()
    generator = torch.Generator().manual_seed(0)
    weight_before = torch.linspace(0.5, 2.0, width).to(dtype) if more else None
    for turn, num_rows in enumerate(rows):
        parts = torch.randn(num_ranks, num_rows, width, generator=generator).to(dtype)
        residual = torch.randn(num_rows, width, generator=generator).to(dtype)
        parts[turn % num_ranks, -1, 3] = torch.nan if turn == 2 else 0.0
        weight, late_s = torch.linspace(-1, 1, width).to(dtype), 0.02 * (turn % num_ranks == rank)
        found = memory.residual_norm(parts[rank], residual, weight_before, weight, **NORM | more)
        total = sum(parts.float(), torch.zeros(())).to(dtype)
        expected = layers.residual_norm(total, residual, weight_before, weight, **NORM | more)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
        assert found[0].isfinite().all(1).tolist() == [True] * (num_rows - 1) + [turn != 2], turn
        if not more:
            exact = (parts.double().sum(0) + residual.double())[:-1]
            difference = (found[0][:-1].double() - exact).abs().sum()
            assert difference <= TOLERANCES[dtype] * exact.abs().sum()
    late_s = 0.0


def check_missing(sums: Any) -> None:
    """A rank that has waited in vain says for whom, gives nothing that is wrong, and waits for nobody any
    more; one that comes later finds what was sent before, and then waits in vain itself."""
    global num_atomics
    ones = torch.ones(3, WIDTH)
    # Its signal, and so many looks for the others'.
    for rank, is_right, expected in ((0, False, 21), (1, True, 2), (1, False, 21), (0, False, 1)):
        if rank == dist.get_rank():
            sums.check() if expected > 1 else None
            num_atomics = 0
            found, _ = sums.joining(256).residual_norm(ones, ones, None, ones[0], most_waits=20, **NORM)
            assert num_atomics == expected
            assert torch.equal(found, 3 * ones) if is_right else found.isnan().all()
        dist.barrier(group)
    try:
        sums.check()
    except RuntimeError as error:
        assert str(error).startswith(f"rank {1 - dist.get_rank()} never signalled")
    else:
        raise AssertionError("nobody is missing")


def check_model(sums_of: Callable[[nn.Module], Any], *, fails_on: int | None = None) -> None:
    """``fails_on``: a rank on which no norm is fused; then none joins sums."""
    model = paged_model("llama", CPU, torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj, layer.mlp.down_proj = Term(layer.self_attn.o_proj), Term(layer.mlp.down_proj)
    model.model.layers[1].self_attn.o_proj.bias = 0.5
    expected = logits_of(model)
    sums_of(model)
    own, own_norm, joined = layers.residual_norm, layers.rms_norm, []
    if fails_on == dist.get_rank():
        layers.rms_norm = None
    fused = FusedLayers(model, CPU, torch.float32)
    layers.rms_norm = own_norm

    def counted(*args: Any, **kwargs: Any) -> Any:
        joined.append(len(args) > 4)
        return own(*args, **kwargs)

    layers.residual_norm = counted
    num_added = 0 if fails_on == dist.get_rank() else 6
    for num_joined in (0, 5, 5):
        joined.clear()
        with fused.active():
            found = logits_of(model)
        assert (len(joined), sum(joined)) == (num_added, num_joined * (fails_on is None)), joined
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    layers.residual_norm = own
    assert bool(getattr(model, SUMMING).choice) == (fails_on is None), "what a run that goes on does"


num_memories, held = 0, list[Tensor]()
InterpreterBuilder.create_atomic_rmw = atomic
symmetric_memory.empty, symmetric_memory.rendezvous = empty, rendezvous
topology = join(tp_size=int(os.environ["WORLD_SIZE"]))
group = dist.new_group([*range(topology.world_size)])
with torch.inference_mode():
    for kind, rows in ((JOINED, (3, 1, 3, 2, 3)), (SHARED_ROWS, (7, 1, 9, 2))):
        check_kernel(kind, 1100, rows, torch.float32)
        check_kernel(kind, 1100, rows[:3], torch.bfloat16, weight_offset=1.0, rounds_first=False)
    check_kernel(SHARED_ROWS, WIDTH, (70, 40), torch.bfloat16)
    if topology.world_size > 2:
        leave()
    # Slow for the second rank where there are many rows; times vary.
    slow = (1, 9)[topology.rank]
    times = (1.2, 9, 1, 1.04, 9, 1, slow, 1, 9, 1.1, 1)
    shared_options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "group": group, "width": WIDTH}
    shared_options |= {"ways": {}, "check": lambda *_: None}
    model = nn.Module()
    choice = choose_sums(model, **shared_options, measure=measured(*times))
    assert choice == [(2048, JOINED), (4096, SHARED_ROWS)], choice
    check_model(lambda model: choose_sums(model, **shared_options, frozen=choice))
    choose_sums(model, **shared_options, frozen=choice)
    check_missing(getattr(model, SUMMING))
    check_model(lambda model: choose_sums(model, **shared_options, frozen=choice), fails_on=1)
    # Signals that never reach the peers.
    peer_memory.CHECK_WAITS = 40
    symmetric_memory.rendezvous = alone
    choose_sums(model, **shared_options, frozen=choice)
    assert getattr(model, SUMMING).joining(256) is None
leave()
