"""Sums over the ranks of a sharded model by reading the peers' memory, where that is right and faster.

A layer that DeepSpeed cuts along its input ends in a sum over the ranks, twice in each layer of the model.
While tokens are generated the messages are short, and NCCL's overhead is most of their time. With torch's
*symmetric memory* one kernel reads the parts of all peers and adds them in the same order on every rank
(one-shot), so that all have the same bits; or the links' switch adds them (multimem, NVLink SHARP). Long
messages stay with NCCL, which sends each part fewer times. Where a residual and a norm follow, one kernel of
the project may do all three (joined). Every way is checked, and those that are right are measured by size at
the start, unless a run that goes on has its choice already.

All ranks of the group decide alike: the kernel of one waits for those of the others, and would wait forever.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_process_group_store

from specdist.models.passes.peer_memory import (
    MAX_ROWS,
    NORM,
    WAYS,
    JoinedMemory,
    NewPeerMemory,
    SymmetricMemory,
)
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.trial import check_difference, said_of, tolerance_of, why_not

# Longer messages: NCCL. Every rank reads all others' parts, so the more ranks, the shorter.
MAX_BYTES_TIMES_RANKS = 2 * 2**20
# Sizes that are measured, of 1 to 64 tokens of 8,192 numbers; a message goes the way of the next larger one.
MEASURED_BYTES = tuple(2**14 * num_tokens for num_tokens in (1, 2, 4, 8, 16, 32, 64))
NUM_SUMS, NUM_REPLAYS = 20, 3
# The choice, as an attribute of a sharded model and in a manifest.
SUMS = "sums_over_ranks"
BACKEND = "all-reduce"
# The way of sums with a residual and a norm after them; of others the choice has a way beside it.
JOINED = "joined with norms"
# The attribute of a model for what sums.
SUMMING = "summing_over_ranks"
# The attribute of a layer for its product, if that is not torch's.
PRODUCT = "product_by_tokens"
# The kernel moves so many bytes at a time.
ALIGNMENT = 16
# Ranks that connect their memory come at the same time: longer, one of them has failed.
MEETING_TIMEOUT = timedelta(seconds=30)
NOT_MET = "another rank has not come to connect its memory"

logger = logging.getLogger(__name__)


# Seconds of a sum over all ranks, called by each.
Measure = Callable[[Callable[[], object]], float]
# Messages up to so many bytes, and their way.
Choice = Sequence[tuple[int, str]]
# Sums numbers [N] over the ranks.
Way = Callable[[Tensor], object]


class Sums:
    """``choice``: ascending; longer messages, and odd ones, are the backend's."""

    def __init__(
        self, group: dist.ProcessGroup, memories: Mapping[str, SymmetricMemory], choice: Choice
    ) -> None:
        self._group, self._memories = group, memories
        self._choice = [pair for pair in choice if pair[1] != JOINED]
        self.joined: Any = memories.get(JOINED)
        self.joined_bytes = max((most for most, way in choice if way == JOINED), default=0)
        # The sums of what runs now: how many, the last, and whether it is left to what follows.
        self._num_made, self._is_left = 0, False
        self._last: Tensor | None = None

    def add(self, output: Tensor) -> Tensor:
        """Add over the ranks; it may overwrite what it is given."""
        self._num_made += 1
        self._last = output if self._is_left else self._added(output)
        return self._last

    def _added(self, output: Tensor) -> Tensor:
        size = output.nbytes
        way = next((way for most, way in self._choice if size <= most), BACKEND)
        if way != BACKEND and size % ALIGNMENT == 0:
            return self._memories[way].sum(output.view(-1)).view(output.shape)
        dist.all_reduce(output, group=self._group)
        return output

    def watched(self, part: Callable[[], Tensor], *, is_left: bool) -> tuple[Tensor, bool]:
        """What a part of a layer gives, and whether it is the only sum in it, with nothing made of it.
        ``is_left``: that was so before, and this rank's term is given, without the sum."""
        self._num_made, self._is_left = 0, is_left
        try:
            output = part()
        finally:
            self._is_left = False
        gives_sum, self._last = self._num_made == 1 and output is self._last, None
        assert gives_sum or not is_left, "a layer makes something else of a sum than before"
        return output, gives_sum


def choose_sums(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    width: int | None = None,
    frozen: Choice | None = None,
    ways: Mapping[str, NewPeerMemory] = WAYS,
    measure: Measure | None = None,
) -> Choice:
    """Let the model's sums over the group go the fastest way, of those that are right on every rank. A
    collective of the group; the log says what is used, and why. Returns the choice by size.

    Args:
        width: of rows whose sums have a residual and a norm after them; None for none.
        frozen: an earlier choice, which stands as far as its ways are right here.
    """
    from deepspeed.module_inject.layers import LinearAllreduce

    max_bytes = MAX_BYTES_TIMES_RANKS // dist.get_world_size(group)
    most = dict.fromkeys(ways, max_bytes // dtype.itemsize)
    if width is not None and width <= max_bytes // dtype.itemsize:
        ways = {**ways, JOINED: functools.partial(JoinedMemory, width)}
        most[JOINED] = min(max_bytes // dtype.itemsize // width, MAX_ROWS) * width
    memories: dict[str, SymmetricMemory] = {}
    reasons: dict[str, str] = {}
    for name in ways if frozen is None else {way for _, way in frozen} & set(ways):
        memory, reason = _checked(most[name], dtype, device, group, ways[name])
        memories |= {} if memory is None else {name: memory}
        reasons |= {name: reason} if memory is None else {}
    choice = frozen
    if choice is None:
        measure = measure or functools.partial(_recorded_s, device)
        sizes = [size for size in MEASURED_BYTES if size <= max_bytes] if memories else []
        alone: dict[str, Way] = {BACKEND: functools.partial(dist.all_reduce, group=group)}
        alone |= {name: memory.sum for name, memory in memories.items() if name != JOINED}
        choice = found = _fastest(alone, sizes, dtype, device, group, measure)
        if width is not None and JOINED in memories:
            rows = range(width * dtype.itemsize, most[JOINED] * dtype.itemsize + 1)
            followed = _followed(Sums(group, memories, found), width)
            joined = _fastest(
                followed, [size for size in sizes if size in rows], dtype, device, group, measure
            )
            # Up to where it is not faster any more.
            choice = [*found, *(pair for pair in joined[:1] if pair[1] == JOINED)]
    choice = [(size, way if way in memories else BACKEND) for size, way in choice]
    sums = Sums(group, memories, choice)
    setattr(model, SUMMING, sums)
    modules = [module for module in model.modules() if not getattr(module, "is_summed_later", False)]
    for module in modules:
        if type(module) is LinearAllreduce or (
            isinstance(module, QuantizedLinear) and module.sums_over_ranks
        ):
            module.forward = functools.partial(summed_product, module, sums)
        elif hasattr(module, "sum_over_ranks"):
            module.sum_over_ranks = sums.add  # type: ignore[assignment]
    used = ", ".join(f"{way} up to {most / 2**10:g} KiB" for most, way in choice)
    logger.info("sums over ranks: %s%s", f"{used}; above " * bool(used) + BACKEND, said_of(reasons))
    return choice


def summed_product(layer: nn.Module, sums: Sums, inputs: Tensor) -> Tensor:
    """What DeepSpeed's layer does, with another sum."""
    if isinstance(layer, QuantizedLinear):
        output = layer.local_product(inputs)
    else:
        product: Any = getattr(layer, PRODUCT, F.linear)
        output = product(inputs, layer.weight)
    output = sums.add(output)
    return output if layer.bias is None else output + layer.bias  # type: ignore[operator]


def _followed(sums: Sums, width: int) -> dict[str, Way]:
    """The two ways of sums with a residual and a norm after them."""

    def add(numbers_N: Tensor, *, is_joined: bool) -> object:
        from specdist.kernels import layers

        rows_MW = numbers_N[: len(numbers_N) // width * width].view(-1, width)
        of_all, run = (rows_MW, sums.joined) if is_joined else (sums.add(rows_MW), layers)
        return run.residual_norm(of_all, rows_MW, None, rows_MW[0], **NORM)

    return {name: functools.partial(add, is_joined=name == JOINED) for name in (BACKEND, JOINED)}


@torch.inference_mode()
def _fastest(
    ways: Mapping[str, Way],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    measure: Measure,
) -> list[tuple[int, str]]:
    """The way of each size that takes the slowest rank the shortest; neighbours of one way are one."""
    own: list[tuple[float, ...]] = []
    for size in sizes:
        numbers_N = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
        own.append(tuple(_seconds(measure, functools.partial(way, numbers_N)) for way in ways.values()))
    of_ranks: list[Any] = [own] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    names, found = list(ways), list[tuple[int, str]]()
    for size, *times in zip(sizes, *of_ranks, strict=True):
        slowest = [max(of_way) for of_way in zip(*times, strict=True)]
        way = names[slowest.index(min(slowest))]
        if found and found[-1][1] == way:
            found.pop()
        found.append((size, way))
    return found


def _seconds(measure: Measure, way: Callable[[], object]) -> float:
    """Infinitely many of a way that cannot be recorded."""
    try:
        return measure(way)
    except Exception:  # all ranks go on to the next way
        logger.debug("a sum over the ranks is not measured", exc_info=True)
        return math.inf


def _recorded_s(device: torch.device, add: Callable[[], object]) -> float:
    """Seconds in a graph, as in a recorded pass; the best of a few replays. As many calls on every rank."""
    add()  # connects the ranks
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_SUMS):
            add()
    seconds = []
    for _ in range(1 + NUM_REPLAYS):
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]) / NUM_SUMS


@torch.inference_mode()
def _checked(
    num_numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    new_memory: NewPeerMemory,
) -> tuple[SymmetricMemory | None, str]:
    """Memory that sums rightly on every rank; else None, and why not, the same on every rank."""
    found: list[SymmetricMemory] = []

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


def _connect(memory: SymmetricMemory, group: dist.ProcessGroup) -> None:
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
    found: list[SymmetricMemory],
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
    most = tolerance_of("sum over ranks", dtype) * float(expected_N.abs().max())
    check_difference(f"sums of {size} numbers differ from all-reduce", difference, most)
    if not torch.equal(first_N, sums_N):
        raise ValueError(f"sums of {size} numbers are not the same on all ranks")


def _first_reason(reason: str, group: dist.ProcessGroup) -> str:
    """The reason of the first rank that has one, its own if any has; empty if none has."""
    reasons: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    found = [(reason == NOT_MET, rank) for rank, reason in enumerate(reasons) if reason]
    if not found:
        return ""
    _, first = min(found)
    return f"rank {first}: {reasons[first]}"
