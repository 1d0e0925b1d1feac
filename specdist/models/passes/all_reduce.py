"""Sums over the ranks of a sharded model by reading the peers' memory, where a check finds that right.

A layer that DeepSpeed cuts along its input ends in a sum over the ranks, twice in each layer of the model.
While tokens are generated the messages are short, and NCCL's overhead is most of their time. With torch's
*symmetric memory* one kernel reads the parts of all peers and adds them in the same order on every rank
(one-shot), so that all have the same bits. Longer messages stay with NCCL, which sends each part fewer times.

All ranks of the group decide alike: the kernel of one waits for those of the others, and would wait forever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_process_group_store

from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.trial import check_difference, why_not

# Longer messages: NCCL. Every rank reads all others' parts, so the more ranks, the shorter.
MAX_BYTES_TIMES_RANKS = 2 * 2**20
# The kernel moves so many bytes at a time.
ALIGNMENT = 16
# A sum in another order, in units of the largest term.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Ranks that connect their memory come at the same time: longer, one of them has failed.
MEETING_TIMEOUT = timedelta(seconds=30)
NOT_MET = "another rank has not come to connect its memory"

logger = logging.getLogger(__name__)


class PeerMemory(Protocol):
    """Memory of a rank that its peers can read. Every method may raise what its library raises."""

    def connect(self) -> None:
        """A collective of the group."""
        ...

    def sum(self, numbers_N: Tensor) -> Tensor:
        """[N]: over all ranks. A collective, and the same bits on each."""
        ...


NewPeerMemory = Callable[[int, torch.dtype, torch.device, dist.ProcessGroup], PeerMemory]


class SymmetricMemory:
    """Torch's, on CUDA devices that can reach one another."""

    def __init__(
        self, num_numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rendezvous = symmetric_memory.rendezvous
        self._buffer_N = symmetric_memory.empty(num_numbers, dtype=dtype, device=device)
        self._group = group

    def connect(self) -> None:
        self._rendezvous(self._buffer_N, self._group)

    def sum(self, numbers_N: Tensor) -> Tensor:
        # The kernel copies the numbers into the buffer, and ends when all ranks have read it.
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self._buffer_N[: len(numbers_N)], numbers_N, "sum", self._group.group_name
        )
        return found


def use_peer_memory(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    new_memory: NewPeerMemory = SymmetricMemory,
) -> bool:
    """Let the model's sums over the group go through the peers' memory, where that is right on every rank. A
    collective of the group; the log says what is used, and why."""
    from deepspeed.module_inject.layers import LinearAllreduce

    modules = [module for module in model.modules() if not getattr(module, "is_summed_later", False)]
    layers = [
        module
        for module in modules
        if type(module) is LinearAllreduce or (isinstance(module, QuantizedLinear) and module.sums_over_ranks)
    ]
    max_bytes = MAX_BYTES_TIMES_RANKS // dist.get_world_size(group)
    memory, reason = _checked(max_bytes // dtype.itemsize, dtype, device, group, new_memory)
    if memory is None:
        logger.info("sums over ranks: the backend's all-reduce; not used: peers' memory: %s", reason)
        return False
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, memory, max_bytes)
    experts = [module for module in modules if hasattr(module, "sum_over_ranks")]
    for module in experts:
        module.sum_over_ranks = functools.partial(_sum, memory, max_bytes, group)  # type: ignore[assignment]
    logger.info(
        "sums over ranks: peers' memory for %d layers up to %d KiB, the backend's all-reduce above",
        len(layers) + len(experts),
        max_bytes // 2**10,
    )
    return True


def _forward(layer: nn.Module, memory: PeerMemory, max_bytes: int, inputs: Tensor) -> Tensor:
    """What DeepSpeed's layer does, with another sum."""
    group: Any
    if isinstance(layer, QuantizedLinear):
        output, group = layer.local_product(inputs), layer.group
    else:
        output = torch.matmul(inputs, layer.weight.transpose(-1, -2))  # type: ignore[operator]
        group = layer.mp_group
    output = _sum(memory, max_bytes, group, output)
    return output if layer.bias is None else output + layer.bias  # type: ignore[operator]


def _sum(memory: PeerMemory, max_bytes: int, group: dist.ProcessGroup, output: Tensor) -> Tensor:
    """Over the ranks; it may overwrite what it is given."""
    if output.nbytes <= max_bytes and output.nbytes % ALIGNMENT == 0:
        return memory.sum(output.view(-1)).view(output.shape)
    dist.all_reduce(output, group=group)
    return output


@torch.inference_mode()
def _checked(
    num_numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    new_memory: NewPeerMemory,
) -> tuple[PeerMemory | None, str]:
    """Memory that sums rightly on every rank; else None, and why not, the same on every rank."""
    found: list[PeerMemory] = []

    def allocate() -> None:
        found.append(new_memory(num_numbers, dtype, device, group))

    # No rank goes on to a step in which it would wait for a peer that has failed before.
    steps = [allocate, lambda: _connect(found[0], group)]
    # The smallest message, one that is not a power of two, and the longest.
    sizes = [ALIGNMENT, num_numbers // 3 // ALIGNMENT * ALIGNMENT, num_numbers]
    # Each twice, since the memory is used again.
    steps += [
        functools.partial(_try, size, seed, dtype, device, group, found) for size in sizes for seed in (0, 1)
    ]
    for step in steps:
        if reason := _first_reason(why_not(step) or "", group):
            return None, reason
    return found[0], ""


def _connect(memory: PeerMemory, group: dist.ProcessGroup) -> None:
    """The ranks meet in the group's store. If one of them fails there alone, the others do not wait for long.

    Raises ValueError if others have not come after :data:`MEETING_TIMEOUT`.
    """
    store = _get_process_group_store(group)
    timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(MEETING_TIMEOUT)
    try:
        memory.connect()
    except dist.DistStoreError as error:
        raise ValueError(NOT_MET) from error
    finally:
        store.set_timeout(timeout)


def _try(
    size: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    found: list[PeerMemory],
) -> None:
    """Sum once. Raises ValueError if the sum is wrong here, or other than that of the first rank."""
    generator = torch.Generator().manual_seed(seed * dist.get_world_size(group) + dist.get_rank(group))
    numbers_N = torch.randn(size, generator=generator).to(device, dtype)
    expected_N = numbers_N.clone()
    dist.all_reduce(expected_N, group=group)
    failure: Exception | None = None
    sums_N = torch.full_like(expected_N, torch.nan)
    try:
        sums_N = found[0].sum(numbers_N)
    except Exception as error:  # raised once the others have this rank's part in what follows
        failure = error
    first_N = sums_N.clone()
    dist.broadcast(first_N, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    difference = float((sums_N.float() - expected_N.float()).abs().max())
    tolerance = TOLERANCES[dtype] * float(expected_N.abs().max())
    check_difference(f"sums of {size} numbers differ from all-reduce", difference, tolerance)
    if not torch.equal(first_N, sums_N):
        raise ValueError(f"sums of {size} numbers are not the same on all ranks")


def _first_reason(reason: str, group: dist.ProcessGroup) -> str:
    """That of the first rank that has one, of its own if any has; empty if none has."""
    reasons: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    found = [(reason == NOT_MET, rank) for rank, reason in enumerate(reasons) if reason]
    if not found:
        return ""
    _, first = min(found)
    return f"rank {first}: {reasons[first]}"
