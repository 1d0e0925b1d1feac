"""Sums over the ranks of a sharded model by reading the peers' memory, where that is right and faster.

A layer that DeepSpeed cuts along its input ends in a sum over the ranks, twice in each layer of the model.
While tokens are generated the messages are short, and NCCL's overhead is most of their time. With torch's
*symmetric memory* one kernel reads the parts of all peers and adds them in the same order on every rank
(one-shot), so that all have the same bits; or the links' switch adds them (multimem, NVLink SHARP). Long
messages are sent fewer times if each rank sums a part and sends it to all (two-shot), as NCCL does, too.
Where a residual and a norm follow, one kernel of the project may do all three (joined), in one or two shots.
Every way is checked, and those that are right are measured by size at the start, unless a run that goes on
has its choice already. Without NVLink between all GPUs no way but NCCL is tried.

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
    JOINED,
    JOINED_WAYS,
    MULTIMEM_TWO_SHOT,
    NORM,
    SHARED_ROWS,
    TWO_SHOT,
    WAYS,
    JoinedMemory,
    NewPeerMemory,
    SharedRowsMemory,
    SymmetricMemory,
    check_links,
)
from specdist.models.quantized.quantized_linear import QuantizedLinear
from specdist.utils.trial import check_difference, said_of, tolerance_of, why_not

# Longer messages: NCCL.
MAX_BYTES = 8 * 2**20
# In one shot every rank reads all others' parts, so the more ranks, the shorter.
MAX_BYTES_TIMES_RANKS = 2 * 2**20
IN_TWO_SHOTS = (TWO_SHOT, MULTIMEM_TWO_SHOT)
# Sizes that are measured, of 1 to 512 tokens of 8,192 numbers; a message goes the way of the next larger one.
MEASURED_BYTES = tuple(2**power for power in range(14, 24))
# A joined sum that takes so much longer is not slower: times vary.
NOT_SLOWER = 1.05
NUM_SUMS, NUM_REPLAYS = 20, 3
# The choice, in a manifest.
SUMS = "sums_over_ranks"
BACKEND = "all-reduce"
# The attribute of a sharded model for what sums.
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
# By size, the seconds of each way that is for it, on the rank where they are most.
Times = Mapping[int, Mapping[str, float]]
# Sums numbers [N] over the ranks.
Way = Callable[[Tensor], object]


class Sums:
    """``choice``: ascending; longer messages, and odd ones, are the backend's."""

    def __init__(
        self, group: dist.ProcessGroup, memories: Mapping[str, SymmetricMemory], choice: Choice
    ) -> None:
        self._group, self._memories = group, memories
        self.choice = [*choice]
        # The sums of what runs now: how many, the last, and whether it is left to what follows.
        self._num_made, self._is_left = 0, False
        self._last: Tensor | None = None

    def add(self, output: Tensor) -> Tensor:
        """Add over the ranks; it may overwrite what it is given."""
        self._num_made += 1
        self._last = output if self._is_left else self._added(output)
        return self._last

    def agree(self, num_fused: int, forms: str, reasons: Mapping[str, str]) -> bool:
        """Whether the ranks have fused the same parts of layers in the same form: else join no sums. A
        collective; ``reasons``: why others are not fused."""
        own = (num_fused, forms, said_of(reasons))
        of_ranks = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(of_ranks, own, group=self._group)
        are_alike = len({forms for _, forms, _ in of_ranks}) == 1
        if not are_alike:
            fewest = min(of_ranks)
            logger.warning(
                "none of the sums joined with norms and no router fused: rank %d has other fused layers%s",
                of_ranks.index(fewest), fewest[-1],
            )  # fmt: skip
            self.choice = [pair for pair in self.choice if pair[1] not in JOINED_WAYS]
        return are_alike

    def check(self) -> None:
        """Raises RuntimeError if a pass that has ended has waited for a rank in vain."""
        for memory in self._memories.values():
            memory.check()

    def joining(self, num_bytes: int) -> Any:
        """What sums so many together with the residual and the norm after them; None if nothing does."""
        return self._memories.get(self._way(num_bytes, is_joined=True))

    def _way(self, num_bytes: int, *, is_joined: bool = False) -> str:
        ways = (way for most, way in self.choice if num_bytes <= most and (way in JOINED_WAYS) == is_joined)
        return next(ways, BACKEND)

    def _added(self, output: Tensor) -> Tensor:
        size, way = output.nbytes, self._way(output.nbytes)
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
    check: Callable[[torch.device, dist.ProcessGroup], object] = check_links,
    measure: Measure | None = None,
) -> Choice:
    """Let the model's sums over the group go the fastest way, of those that are right on every rank. A
    collective of the group; the log says what is used, and why. Returns the choice by size.

    Args:
        width: of rows whose sums have a residual and a norm after them; None for none.
        frozen: an earlier choice, which stands as far as its ways are right here.
        check: raises an error where no way of ``ways`` may be tried.
    """
    from deepspeed.module_inject.layers import LinearAllreduce

    in_one_shot = MAX_BYTES_TIMES_RANKS // dist.get_world_size(group)
    most = {name: MAX_BYTES if name in IN_TWO_SHOTS else in_one_shot for name in ways}
    row_bytes = 0 if width is None else width * dtype.itemsize
    if width is not None and row_bytes <= in_one_shot:
        ways = {**ways, **{name: functools.partial(new, width) for name, new in JOINED_WAYS.items()}}
        most[JOINED] = min(in_one_shot // row_bytes, JoinedMemory.max_rows) * row_bytes
        most[SHARED_ROWS] = min(MAX_BYTES // row_bytes, SharedRowsMemory.max_rows) * row_bytes
    memories: dict[str, SymmetricMemory] = {}
    reasons: dict[str, str] = {}
    if reason := _first_reason(why_not(functools.partial(check, device, group)) or "", group):
        ways, reasons = {}, {"memory of peers": reason}
    # In one order on all ranks.
    for name in ways if frozen is None else [way for way in ways if way in {own for _, own in frozen}]:
        memory, reason = _checked(most[name] // dtype.itemsize, dtype, device, group, ways[name])
        memories |= {} if memory is None else {name: memory}
        reasons |= {name: reason} if memory is None else {}
    choice = frozen
    if choice is None:
        measure = measure or functools.partial(_recorded_s, device, group)
        slowest = functools.partial(_slowest, most, dtype, device, group, measure)
        sizes = MEASURED_BYTES if memories else ()
        alone: dict[str, Way] = {BACKEND: functools.partial(dist.all_reduce, group=group)}
        alone |= {name: memory.sum for name, memory in memories.items() if name not in JOINED_WAYS}
        choice = _fastest(slowest(alone, sizes))
        joined = {name: memory for name, memory in memories.items() if name in JOINED_WAYS}
        if joined and width is not None:
            followed = _followed(Sums(group, memories, choice), joined, width)
            choice += _up_to(slowest(followed, [size for size in sizes if size >= row_bytes]))
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


def _followed(sums: Sums, joined: Mapping[str, Any], width: int) -> dict[str, Way]:
    """The ways of sums with a residual and a norm after them."""

    def add(memory: Any, numbers_N: Tensor) -> object:
        from specdist.kernels import layers

        rows_MW = numbers_N[: len(numbers_N) // width * width].view(-1, width)
        of_all, run = (sums.add(rows_MW), layers) if memory is None else (rows_MW, memory)
        return run.residual_norm(of_all, rows_MW, None, rows_MW[0], **NORM)

    return {name: functools.partial(add, joined.get(name)) for name in (*joined, BACKEND)}


@torch.inference_mode()
def _slowest(
    most: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    measure: Measure,
    ways: Mapping[str, Way],
    sizes: Sequence[int],
) -> Times:
    own: dict[int, dict[str, float]] = {}
    for size in sizes:
        numbers_N = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
        fitting = {name: way for name, way in ways.items() if size <= most.get(name, size)}
        if len(fitting) > 1:
            own[size] = {name: measure(functools.partial(way, numbers_N)) for name, way in fitting.items()}
    of_ranks: list[Any] = [own] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    return {size: {name: max(times[size][name] for times in of_ranks) for name in own[size]} for size in own}


def _fastest(times: Times) -> list[tuple[int, str]]:
    """The way of each size that takes the shortest; neighbours of one way are one."""
    found = list[tuple[int, str]]()
    for size, seconds in times.items():
        way = min(seconds, key=seconds.__getitem__)
        if found and found[-1][1] == way:
            found.pop()
        found.append((size, way))
    return found


def _up_to(times: Times) -> list[tuple[int, str]]:
    """The largest size at which each joined way is not slower than those for longer messages, and than the
    sum apart: times vary, and the shortest most."""
    found = list[tuple[int, str]]()
    ways = [*JOINED_WAYS, BACKEND]
    for index, name in enumerate(JOINED_WAYS):
        for size, seconds in times.items():
            least = min(seconds.get(longer, math.inf) for longer in ways[index + 1 :])
            if seconds.get(name, math.inf) <= NOT_SLOWER * least < math.inf:
                found = [*(pair for pair in found if pair[1] != name), (size, name)]
    return found


def _recorded_s(device: torch.device, group: dist.ProcessGroup, add: Callable[[], object]) -> float:
    """Seconds in a graph, as in a recorded pass; the best of a few replays. As many calls on every rank:
    infinitely many on all if one cannot record it, for whose replay the others' would wait."""
    graph = torch.cuda.CUDAGraph()

    def record() -> None:
        add()  # connects the ranks
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(NUM_SUMS):
                add()

    if reason := _first_reason(why_not(record) or "", group):
        logger.debug("a sum over the ranks is not measured: %s", reason)
        return math.inf
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
